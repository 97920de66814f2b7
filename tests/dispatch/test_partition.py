"""Kernels on eight devices: what each device computes, and what devices tell each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effattn
from effattn.testing import functions
from tests.laws.sharding import collectives
from tests.marks import slow

pytestmark = pytest.mark.devices

ROWS, TOKENS, SIZE = 8, 48, 16
MECHANISMS = {
    "block_attention": functools.partial(effattn.dot_product_attention, is_causal=True),
    "linear_recurrence": lambda *arrays, **options: effattn.linear_attention(
        *arrays, is_causal=True, initial_state=_initial(*arrays[1:]), return_state=True, **options
    ),
}


def _initial(key, value):
    """An initial state made of keys and values, so that its gradient is tested too."""
    key, value = (x[..., 0, :, :] for x in (jnp.exp(key), value))
    values = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)
    return key[..., :, None] * values[..., None, :]


BY_HEAD, BY_ROW = P("batch", None, "heads"), P("batch")


@pytest.fixture(autouse=True)
def on_x86(monkeypatch):
    """Kernels are the default on these processors, whatever processor runs the tests."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def mesh_of(shape, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, ("batch", "heads"), (axis_type,) * 2)


def arrays_of(heads, key_heads):
    counts = heads, key_heads, key_heads, heads
    keys = jax.random.split(jax.random.key(heads + key_heads), 4)
    return [
        jax.random.normal(key, (ROWS, TOKENS, count, SIZE))
        for key, count in zip(keys, counts, strict=True)
    ]


def with_gradients(function, **options):
    """The function `(query, key, value, cotangent) -> (output, gradients)`."""

    @jax.jit
    def run(query, key, value, cotangent):
        call = functools.partial(function, **options)
        results, pull_back = jax.vjp(call, query, key, value)
        # States have other shapes than outputs; their cotangent is made of the cotangent of these.
        like = jax.tree.map(lambda x: x if x.shape != cotangent.shape else cotangent, results)
        return results, pull_back(like)

    return run


def placed(mesh, arrays, of_queries, of_keys):
    specs = of_queries, of_keys, of_keys, of_queries
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def kernels(lowered, name):
    text = lowered.compile().as_text()
    return [way for way in ("forward", "backward") if f"effattn_{name}_{way}" in text]


@pytest.mark.parametrize(
    ("shape", "heads", "key_heads", "of_queries", "of_keys", "messages"),
    [
        ((4, 2), 8, 8, BY_HEAD, BY_HEAD, []),
        slow((4, 2), 8, 2, BY_HEAD, BY_HEAD, []),
        slow((8, 1), 2, 1, BY_ROW, BY_ROW, []),
        slow((4, 2), 8, 8, P(("batch", "heads")), P(("batch", "heads")), []),
        # A key head whose query heads are on several devices: its gradients are summed.
        ((4, 2), 8, 1, BY_HEAD, BY_ROW, ["all-reduce"]),
        slow((2, 4), 8, 2, BY_HEAD, BY_ROW, ["all-reduce"]),
        slow(
            (2, 4), 8, 4, P(None, None, ("heads", "batch")), P(None, None, "heads"), ["all-reduce"]
        ),
        # Heads that cannot be divided evenly, and tokens, are gathered.
        ((2, 4), 6, 6, BY_ROW, P(None, "heads"), ["all-gather", "all-reduce"]),
        ((4, 2), 8, 8, P("batch", "heads"), BY_HEAD, ["all-gather", "all-to-all"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MECHANISMS)
def test_each_device_runs_the_kernel_for_its_rows_and_heads(
    name, shape, heads, key_heads, of_queries, of_keys, messages
):
    arrays = arrays_of(heads, key_heads)
    expected = with_gradients(MECHANISMS[name], implementation="xla")(*arrays)
    there = placed(mesh_of(shape), arrays, of_queries, of_keys)
    lowered = with_gradients(MECHANISMS[name]).lower(*there)
    assert kernels(lowered, name) == ["forward", "backward"]
    program = lowered.compile()
    assert set(collectives(program)) <= {*messages}
    functions.assert_close(program(*there), expected, 10 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("name", MECHANISMS)
def test_explicit_axes(name):
    """On a mesh with explicit axes, types say where rows and heads are."""
    arrays = arrays_of(8, 2)
    expected = with_gradients(MECHANISMS[name], implementation="xla")(*arrays)
    mesh = mesh_of((4, 2), AxisType.Explicit)
    there = placed(mesh, arrays, BY_HEAD, BY_HEAD)
    with jax.set_mesh(mesh):
        lowered = with_gradients(MECHANISMS[name]).lower(*there)
        assert kernels(lowered, name) == ["forward", "backward"]
        program = lowered.compile()
        assert collectives(program) == []
        got = program(*there)
    functions.assert_close(got, expected, 10 * np.finfo(np.float32).eps)


def _gated(query, key, value, **options):
    sizes = {"compression_size": 8, "compression_stride": 4, "block_size": 8, "num_selected": 4}
    gates = jax.nn.sigmoid(query[..., :3])
    return effattn.native_sparse_attention(query, key, value, gates=gates, **sizes, **options)


def _indexed(query, key, value, **options):
    given = {"index_key": query.mean(-2), "index_query": jnp.sin(query.sum(-2, keepdims=True))}
    given["index_weights"] = query.mean((-2, -1))[..., None]
    return effattn.indexed_attention(query, key, value, top_k=6, **given, **options)


CHOICES = {
    "native_sparse": _gated,
    "chosen_keys": _indexed,
    "block_attention": functools.partial(effattn.moba_attention, block_size=8, top_k=3),
}


@pytest.mark.parametrize(
    ("shape", "key_heads", "of_queries", "of_keys", "types"),
    [
        slow((4, 2), 2, BY_HEAD, BY_HEAD, "EE"),
        slow((8, 1), 2, BY_ROW, BY_ROW, "EE"),
        # A key head whose query heads are on several devices.
        slow((2, 4), 2, BY_HEAD, BY_ROW, "EE"),
        ((4, 2), 1, BY_HEAD, BY_ROW, "EE"),
        slow((4, 2), 2, P("batch", "heads"), P("batch", "heads"), "EE"),
        slow((4, 2), 2, BY_ROW, BY_ROW, "EA"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CHOICES)
def test_explicit_axes_of_mechanisms_that_choose(
    name, shape, key_heads, of_queries, of_keys, types
):
    """Each device chooses for its rows and heads, and runs kernels if all axes are explicit."""
    arrays = arrays_of(8, key_heads)
    run = with_gradients(CHOICES[name])
    expected = with_gradients(CHOICES[name], implementation="xla")(*arrays)
    of = {"E": AxisType.Explicit, "A": AxisType.Auto}
    mesh = jax.make_mesh(shape, ("batch", "heads"), tuple(of[t] for t in types))
    there = placed(mesh, arrays, of_queries, of_keys)
    with jax.set_mesh(mesh):
        lowered = run.lower(*there)
        found = kernels(lowered, name)
        got = run(*there)
    assert found == (["forward", "backward"] if types == "EE" else [])
    assert jax.typeof(got[0]).sharding.spec == jax.typeof(there[0]).sharding.spec
    functions.assert_close(got, expected, 10 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_in_xla_heads_with_tiles_of_their_own_need_no_collective(axis_type):
    """The steps over key tiles are as many as the most of any head, which no device need ask."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (ROWS, 256, 4, SIZE)) for key in keys]
    attend = functools.partial(effattn.bigbird_attention, block_size=16, is_causal=True)
    run = with_gradients(attend, implementation="xla")
    mesh = mesh_of((4, 2), axis_type)
    with jax.set_mesh(mesh):
        there = placed(mesh, arrays, BY_HEAD, BY_HEAD)
        program = run.lower(*there).compile()
        assert collectives(program) == []
        got = program(*there)
    functions.assert_close(got, run(*arrays), 10 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("name", MECHANISMS)
def test_vmap_adds_an_axis_that_is_partitioned_too(name):
    """The mapped axis is that of the devices; keys and values are shared."""
    query, key, value, cotangent = arrays_of(4, 4)
    run = with_gradients(MECHANISMS[name])
    mapped = jax.jit(jax.vmap(run, (1, None, None, 1)))
    doubled = [jnp.stack([x, 2 * x], 1) for x in (query, cotangent)]
    alone = [run(x, key, value, y) for x, y in ((query, cotangent), (2 * query, 2 * cotangent))]
    mesh = mesh_of((2, 4))
    sharding = NamedSharding(mesh, P(None, "batch", None, "heads"))
    queries, cotangents = (jax.device_put(x, sharding) for x in doubled)
    program = mapped.lower(queries, key, value, cotangents).compile()
    assert f"effattn_{name}_forward" in program.as_text()
    expected = jax.tree.map(lambda *each: jnp.stack(each), *alone)
    functions.assert_close(program(queries, key, value, cotangents), expected, 1e-6)


def test_programs_for_one_of_several_devices_have_no_partitions():
    """Such programs call the kernel itself, and can be exported."""
    query = jnp.zeros((2, 16, 2, 8))
    run = jax.jit(MECHANISMS["block_attention"])
    lowered = run.lower(query, query, query)
    assert "effattn_block_attention_forward" in lowered.as_text()
    assert "CustomSPMDPartitioning" not in lowered.as_text()
    exported = jax.export.export(run)(query, query, query)
    assert "custom_call @effattn" not in exported.mlir_module()
    assert exported.call(query, query, query).shape == query.shape


def test_programs_for_several_devices_are_exported_without_kernels():
    query = jax.device_put(jnp.ones((8, 32, 2, 8)), NamedSharding(mesh_of((4, 2)), BY_HEAD))
    exported = jax.export.export(jax.jit(MECHANISMS["block_attention"]))(query, query, query)
    assert exported.nr_devices == 8
    assert "custom_call @effattn" not in exported.mlir_module()
    np.testing.assert_allclose(exported.call(query, query, query), 1, rtol=1e-6)


def test_kernels_of_other_options_are_other_programs():
    """XLA's cache of compiled programs must not take one for the other."""
    query = jax.device_put(jnp.zeros((8, 32, 2, 8)), NamedSharding(mesh_of((8, 1)), BY_ROW))

    def marks(window):
        call = functools.partial(effattn.sliding_window_attention, local_window_size=window)
        text = jax.jit(call).lower(query, query, query).as_text()
        return {line for line in text.splitlines() if "tensor<ui32>" in line and "dense" in line}

    assert marks(3) and marks(3) == marks(3)
    assert marks(3) != marks(5)


def test_a_shard_map_over_some_axes_takes_xla():
    mesh = mesh_of((4, 2))
    query = jnp.zeros((8, 32, 2, 8))
    call = MECHANISMS["block_attention"]
    in_part = jax.shard_map(
        call, mesh=mesh, in_specs=(BY_ROW,) * 3, out_specs=BY_ROW, axis_names={"batch"}
    )
    assert "effattn_block" not in jax.jit(in_part).lower(query, query, query).as_text()
    whole = jax.shard_map(call, mesh=mesh, in_specs=(BY_HEAD,) * 3, out_specs=BY_HEAD)
    assert "effattn_block" in jax.jit(whole).lower(query, query, query).as_text()
