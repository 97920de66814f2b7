"""Block attention by the CPU kernels: agreement with float64, and other promises."""

import dataclasses
import functools
import platform
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import effattn
from effattn import patterns
from effattn.llvm import block_attention as kernels
from effattn.llvm import runtime
from effattn.testing.functions import as_float64, assert_close
from effattn.testing.laws import rms
from tests.dense import draw, with_gradients
from tests.marks import slow_but_for
from tests.pallas import block_cases
from tests.pallas.block_cases import IDS, Case, square

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)
attend = functools.partial(effattn.dot_product_attention, implementation="llvm")
LENGTHS = {"query_seq_lengths": np.array([70, 40]), "key_value_seq_lengths": np.array([61, 0])}

CASES = {
    "tails": Case(),
    "one token": Case(square(1)),
    "one query": Case({"queries": 1}, lambda: {"is_causal": True, "query_offset": 149}),
    "batch axes": Case({"batch": (2, 1, 3), "queries": 20, "keys": 20, "key_heads": 1}),
    "no batch axis": Case({"batch": ()}),
    "sizes off a vector": Case(square(130, size=37, value_size=3), lambda: {"is_causal": True}),
    "heads of 200 and 40": Case(square(40, size=200, value_size=40), lambda: {"is_causal": True}),
    "window": Case(square(300), lambda: {"local_window_size": (37, 5)}),
    "window and offset": Case(
        {"queries": 200, "keys": 300}, lambda: {"local_window_size": (90, 0), "query_offset": 70}
    ),
    "nothing to see": Case(square(), lambda: {"is_causal": True, "query_offset": -40}),
    "more tiles than go together": Case(square(900, batch=(1,)), lambda: {"is_causal": True}),
    "documents": Case(square(), lambda: {"segment_ids": jnp.asarray(IDS), "is_causal": True}),
    "documents and lengths": Case(
        square(),
        lambda: {
            "segment_ids": (jnp.asarray(IDS), jnp.asarray(IDS[::-1])),
            "key_value_seq_lengths": jnp.array([100, 61]),
        },
    ),
    "documents that fill tiles": Case(
        {"queries": 600, "keys": 256},
        lambda: {
            "segment_ids": (
                np.repeat([[1, 2, 3, 0], [9, 2, 5, 2]], [130, 190, 200, 80], axis=1),
                np.repeat([[3, 1, 0, 2], [2, 2, 9, 7]], [64, 64, 58, 70], axis=1),
            )
        },
    ),
    "lengths": Case({}, lambda: LENGTHS),
    "a bias of keys": Case(square(), lambda: {"is_causal": True}, more={"bias": (4, 1, 150)}),
    "a bias of keys for all heads": Case({}, lambda: {"scale": 0.3}, more={"bias": (2, 1, 1, 150)}),
    "a bias of pairs": Case(square(), lambda: {"is_causal": True}, more={"bias": (2, 4, 150, 150)}),
    "a bias of pairs for all heads, and a cap": Case(
        square(), lambda: LENGTHS | {"logits_soft_cap": 2.0}, more={"bias": (150, 150)}
    ),
    "a bias of pairs by head, in a window": Case(
        {"queries": 100, "keys": 150},
        lambda: {"local_window_size": (40, 5), "query_offset": 50},
        more={"bias": (4, 100, 150)},
    ),
    "a mask of keys": Case(
        {}, lambda: {"mask": np.random.default_rng(1).random((2, 1, 1, 150)) < 0.6}
    ),
    "a soft cap": Case(square(), lambda: {"is_causal": True, "logits_soft_cap": 1.5}),
    "a soft cap, a bias of keys and documents": Case(
        square(),
        lambda: {"segment_ids": jnp.asarray(IDS), "logits_soft_cap": 0.4},
        more={"bias": (4, 1, 150)},
    ),
    "a sink": Case(square(), lambda: {"is_causal": True}, more={"sink": (4,)}),
    "dilated": Case(
        square(),
        lambda: {"local_window_size": (9, 0), "dilation": 3},
        effattn.sliding_window_attention,
    ),
    "vmap": Case(square(), lambda: {"is_causal": True}, block_cases.mapped),
    "layout": Case({}, dict, block_cases.over_layout((), True)),
    "layout of heads": Case({}, dict, block_cases.over_layout((2,), True)),
    "layout and documents": Case(
        square(), lambda: {"segment_ids": jnp.asarray(IDS)}, block_cases.over_layout((), True)
    ),
    "pattern": Case(
        square(300), lambda: {"pattern": block_cases.PATTERN}, effattn.sparse_attention
    ),
    "pattern and lengths": Case(
        {}, lambda: {"pattern": block_cases.PATTERN} | LENGTHS, effattn.sparse_attention
    ),
    "pattern and offset": Case(
        {"queries": 200, "keys": 300},
        lambda: {"pattern": block_cases.PATTERN, "query_offset": 90},
        effattn.sparse_attention,
    ),
    "many tiles of a pattern": Case(
        square(900, batch=(1,)),
        lambda: {
            "pattern": patterns.Causal() & (patterns.SlidingWindow(70, 0) | patterns.Prefix(9))
        },
        effattn.sparse_attention,
    ),
    "BigBird": Case(
        square(200), lambda: {"block_size": 12, "is_causal": True}, effattn.bigbird_attention
    ),
}


# Each of these is covered by a case with one option more.
PLAIN = (
    *("no batch axis", "heads of 200 and 40", "window", "documents", "layout", "pattern"),
    *("a bias of keys for all heads", "a bias of pairs", "a soft cap", "pattern and lengths"),
    "more tiles than go together",
)


@pytest.mark.parametrize("name", slow_but_for([name for name in CASES if name not in PLAIN], CASES))
def test_it_agrees_with_float64(name):
    """Checks outputs, log-sum-exps and every gradient."""
    case = CASES[name]
    assert_close(case.run("llvm", np.float32), block_cases.exact(case), 2e-6)


@pytest.mark.parametrize("fill", [-np.inf, np.finfo(np.float32).min])
def test_a_bias_that_forbids_keys_has_the_gradients_of_xla(fill):
    """All keys of the first head, and some of the others; the last tile is not full."""
    arrays = draw(queries=40, keys=40, dtype=np.float32)
    bias = np.zeros((4, 1, 40), np.float32)
    bias[0], bias[1:, :, 10:30] = fill, fill

    def run(implementation):
        def call(arrays, _):
            return effattn.dot_product_attention(
                **arrays, is_causal=True, return_residual=True, implementation=implementation
            )

        return with_gradients(call, {**arrays, "bias": bias})

    assert_close(run("llvm"), run("xla"), 2e-6)


@pytest.mark.parametrize("name", ["dilated", "lengths", "a mask of keys"])
def test_it_agrees_with_float64_where_integers_have_64_bits(name):
    with jax.enable_x64(True):
        found = CASES[name].run("llvm", np.float32)
    assert_close(found, block_cases.exact(CASES[name]), 2e-6)


@pytest.mark.usefixtures("lanes")
def test_vectors_of_every_width_agree():
    case = CASES["documents and lengths"]
    assert_close(case.run("llvm", np.float32), block_cases.exact(case), 2e-6)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_errors_are_at_most_twice_those_of_the_plain_form(size):
    """Logits have their usual size, or are about a thousand times as large."""

    def plain(query, key, value, **_):
        key, value = (jnp.repeat(x, 2, 2) for x in (key, value))
        logits = jnp.einsum("btnh,bsnh->bnts", query * size, key * size) * query.shape[-1] ** -0.5
        logits = jnp.where(jnp.tri(500, dtype=bool), logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, -1)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)
        return out, jnp.moveaxis(lse, 1, 2)

    def ours(query, key, value, **options):
        return effattn.dot_product_attention(query * size, key * size, value, **options)

    sizes = square(500, size=64, value_size=64)
    case = Case(sizes, lambda: {"is_causal": True}, ours)
    results = (
        case.run("llvm", np.float32),
        dataclasses.replace(case, function=plain).run(None, np.float32),
    )
    trees = (jax.tree.leaves(as_float64(tree)) for tree in (*results, block_cases.exact(case)))
    for a, b, exact in zip(*trees, strict=True):
        assert rms(a - exact) <= 2 * rms(b - exact)


def test_padding_reaches_nothing():
    """Padding holds NaN."""
    arrays = draw(70, 70, size=16, value_size=16, dtype=np.float32)
    lengths = np.array([70, 33])
    known = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}

    def function(arrays, known):
        return attend(**arrays, **known, is_causal=True, return_residual=True)

    padded = {name: np.array(x) for name, x in arrays.items()}
    for x in padded.values():
        x[1, 33:] = np.nan
    (out, lse), gradients = with_gradients(function, padded, known)
    (wanted, wanted_lse), wanted_gradients = with_gradients(function, arrays, known)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, wanted_gradients[name])


def test_no_token_before_a_change_notices_it():
    """Earlier outputs stay equal bit for bit, on either side of a tile's edge."""
    arrays = draw(200, 200, size=16, value_size=16, dtype=np.float32)
    before = attend(**arrays, is_causal=True)
    for token in (63, 64, 130, 199):
        changed = {name: np.array(x) for name, x in arrays.items()}
        for x in changed.values():
            x[:, token:] += 1
        after = attend(**changed, is_causal=True)
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert (before[:, token] != after[:, token]).any()


def test_examples_and_documents_are_alone():
    """Results agree bit for bit if a document begins with a tile, because the sums are the same."""
    arrays = draw(192, 192, size=16, value_size=16, dtype=np.float32)
    together = attend(**arrays, is_causal=True)
    packed = {name: np.concatenate(x, 0)[None] for name, x in arrays.items()}
    ids = np.repeat([[1, 2]], 192, 1)
    in_one = attend(**packed, is_causal=True, segment_ids=ids)
    for n in range(2):
        alone = attend(**{name: x[n] for name, x in arrays.items()}, is_causal=True)
        np.testing.assert_array_equal(together[n], alone)
        np.testing.assert_array_equal(in_one[0, 192 * n : 192 * (n + 1)], alone)


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_tasks_that_share_a_key_head_add_up(threads, monkeypatch):
    """Any number of threads gives equal results up to rounding, reproducible bit for bit."""
    monkeypatch.setattr(kernels, "threads", lambda: threads)
    jax.clear_caches()
    case = Case(square(400, batch=(1,), key_heads=1), lambda: {"is_causal": True})
    once = case.run("llvm", np.float32)
    assert_close(once, block_cases.exact(case), 2e-6)
    for a, b in zip(*map(jax.tree.leaves, (once, case.run("llvm", np.float32))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_many_may_call_at_once():
    """Each call has a job of its own, which all threads of the pool share."""
    arrays = draw(300, 300, size=16, value_size=16, dtype=np.float32)
    run = jax.jit(functools.partial(attend, is_causal=True))
    wanted = run(**arrays)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: run(**arrays), range(64)):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.devices
def test_inside_shard_map_each_device_has_its_own():
    arrays = draw(100, 100, batch=(4,), size=16, value_size=16, dtype=np.float32)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), (AxisType.Auto,) * 2)
    spec = PartitionSpec("rows", None, "heads")

    def gradients(query, key, value):
        out, pull_back = jax.vjp(functools.partial(attend, is_causal=True), query, key, value)
        return out, *pull_back(value.repeat(2, -2))

    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 4)
    found = jax.jit(sharded)(*arrays.values())
    assert_close(found, jax.jit(gradients)(*arrays.values()), 1e-6)


def test_hessians_are_those_of_xla():
    arrays = draw(17, 17, batch=(), heads=1, key_heads=1, dtype=np.float32)

    def loss(query, implementation):
        given = arrays | {"query": query}
        return jnp.sum(
            effattn.dot_product_attention(**given, is_causal=True, implementation=implementation)
            ** 2
        )

    ours, theirs = (jax.hessian(loss)(arrays["query"], name) for name in ("llvm", "xla"))
    assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("transform", ["hessian times vector", "exported gradient"])
def test_layouts_of_several_tiles_have_the_second_derivatives_and_programs_of_xla(transform):
    query = draw(300, 300, batch=(), heads=1, key_heads=1, dtype=np.float32)["query"]

    def loss(implementation):
        call = functools.partial(effattn.bigbird_attention, block_size=16, seed=0)
        return lambda x: jnp.sum(call(x, x, x, implementation=implementation) ** 2)

    def run(name):
        if transform == "exported gradient":
            exported = jax.export.export(jax.jit(jax.grad(loss(name))))(query)
            assert "effattn_block_attention_forward" not in exported.mlir_module()
            return exported.call(query)
        return jax.jvp(jax.grad(loss(name)), (query,), (query,))[1]

    assert_close(run("llvm"), run("xla"), 1e-5)


def test_the_gradient_of_a_bias_of_pairs_is_exact_where_logits_are_large():
    arrays = draw(127, 200, heads=1, key_heads=1, size=64, dtype=np.float32)
    arrays = {name: 30 * x if name in ("query", "key") else x for name, x in arrays.items()}
    bias = np.random.default_rng(1).normal(size=(127, 200)).astype(np.float32)

    def gradient(arrays, bias, implementation):
        def loss(bias):
            call = functools.partial(
                effattn.dot_product_attention, is_causal=True, return_residual=True
            )
            out, lse = call(**arrays, bias=bias, implementation=implementation)
            return jnp.sum(out**2) + jnp.sum(lse)

        return jax.grad(loss)(bias)

    with jax.enable_x64(True):
        exact = gradient(as_float64(arrays), bias.astype(np.float64), "xla")
    ours, theirs = (abs(gradient(arrays, bias, name) - exact).max() for name in ("llvm", "xla"))
    assert ours <= 2 * theirs


def kernels_of(function, *arguments):
    text = jax.jit(function).lower(*arguments).as_text()
    return "effattn_block_attention_forward" in text


def test_calls_that_name_nothing_take_them_where_there_is_one_device(monkeypatch):
    """The default takes CPU kernels in float32 from a part of a tile up, and XLA elsewhere."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    query = np.zeros((1, 16, 2, 8), np.float32)
    call = functools.partial(effattn.dot_product_attention, is_causal=True)
    assert kernels_of(call, query, query, query)
    window = functools.partial(effattn.sliding_window_attention, local_window_size=3)
    assert kernels_of(window, query, query, query)
    blocks = functools.partial(
        effattn.block_sparse_attention, block_size=4, block_mask=lambda m, n: m == n
    )
    assert kernels_of(blocks, query, query, query)
    assert kernels_of(functools.partial(call, logits_soft_cap=3.0), query, query, query)
    mod = functools.partial(call, score_mod=lambda logit, *_: logit + 1)
    assert not kernels_of(mod, query, query, query)
    assert not kernels_of(functools.partial(call, implementation="xla"), query, query, query)
    assert not kernels_of(call, query[:, 1:], query[:, 1:], query[:, 1:])
    half = jnp.bfloat16(query)
    assert not kernels_of(call, half, half, half)


def test_its_memory_is_linear_in_length():
    """Temporary bytes of forward and backward, without arguments and results."""

    def temporaries(tokens):
        shapes = [jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.float32)] * 3

        def gradients(*arrays):
            out, pull_back = jax.vjp(functools.partial(attend, is_causal=True), *arrays)
            return pull_back(out)

        return jax.jit(gradients).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(32768) <= 4.01 * temporaries(8192)


def test_exported_programs_have_none():
    """Exported programs may run on machines without kernels; their number of rows may be open."""
    query = draw(40, 40, size=8, value_size=8, key_heads=4, dtype=np.float32)
    call = jax.jit(functools.partial(attend, is_causal=True))
    rows = jax.export.symbolic_shape("rows")
    shapes = [jax.ShapeDtypeStruct((*rows, *x.shape[1:]), x.dtype) for x in query.values()]
    exported = jax.export.export(call)(*shapes)
    assert "effattn_block_attention" not in exported.mlir_module()
    np.testing.assert_allclose(exported.call(*query.values()), call(*query.values()), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"score_mod": lambda logit, *_: logit, "tile": (16, 16)},
            "does not take score_mod and tile",
        ),
        (
            {"bias": np.zeros((1, 1, 11, 1), np.float32)},
            "does not take a bias other than float32 numbers of keys or of pairs",
        ),
        ({"scale": jnp.float32(2)}, "does not take a traced scale"),
        ({"query_offset": jnp.int32(2)}, "does not take a traced query_offset"),
    ],
)
def test_it_says_what_it_does_not_take(options, message):
    arrays = draw(dtype=np.float32)
    with pytest.raises(
        NotImplementedError, match=f"{message}; implementation='xla' takes these arguments"
    ):
        attend(**arrays, **options)


@pytest.mark.parametrize("name", ["layout of examples and documents", "traced layout"])
def test_it_says_which_layouts_it_takes(name):
    case = block_cases.CASES[name]
    with pytest.raises(NotImplementedError, match="does not take a layout that is traced, or that"):
        case.run("llvm", np.float32)


def test_it_says_which_dtypes_and_machines_it_takes(monkeypatch):
    arrays = {name: jnp.bfloat16(x) for name, x in draw(dtype=np.float32).items()}
    with pytest.raises(NotImplementedError, match="takes float32, got bfloat16"):
        attend(**arrays)
    monkeypatch.setattr(runtime, "lanes", lambda: 0)
    with pytest.raises(NotImplementedError, match="needs a CPU with AVX2 and FMA, or with NEON"):
        attend(**draw(dtype=np.float32))
