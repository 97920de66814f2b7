"""Block attention for Hopper: interpreted, against float64; lowered; and refused arguments."""

import dataclasses
import functools
import heapq
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec

import effattn
from effattn import dispatch, patterns
from effattn.interfaces.block_attention import Config, Inputs
from effattn.pallas.mosaic_gpu import block_attention
from effattn.pallas.mosaic_gpu.schedule import Schedule, schedule_of
from effattn.patterns.layouts import BlockLayout
from effattn.testing.functions import as_float64, assert_close
from effattn.testing.laws import rms
from tests.dense import cotangents, draw, with_gradients
from tests.marks import slow_but_for
from tests.pallas import block_cases
from tests.pallas.block_cases import Case, over_layout, square
from tests.pallas.lowering import MOSAIC_GPU, TRITON, kernels_of, mesh_of

attend = functools.partial(effattn.dot_product_attention, implementation="mosaic_gpu")


@dataclasses.dataclass(frozen=True)
class Half(Case):
    """A case of few heads and tiles, with queries, keys and values in half precision.

    The interpreter takes a tenth of a second for a tile.
    """

    rounded_to: type = np.float16

    def arrays(self, dtype=np.float16):
        of_tokens = {"query", "key", "value"}
        few = {"batch": (1,), "heads": 2, "key_heads": 1, "queries": 70, "keys": 150}
        arrays = Case(few | self.sizes, more=self.more, rounded_to=self.rounded_to).arrays()
        wide = np.promote_types(dtype, np.float32)
        return {name: x.astype(dtype if name in of_tokens else wide) for name, x in arrays.items()}


TILE = {"tile": (64, 64)}
IDS = np.repeat([1, 2, 3, 0], [30, 50, 40, 30])[None]
PATTERN = patterns.Causal() & (
    patterns.RandomBlocks(64, 1, seed=0) | patterns.Custom(lambda i, j: (i - j) % 5 == 0)
)


def tabled(query, key, value, slopes, table, **options):
    """A score_mod that reads a table by head and a table by position."""

    def score_mod(logit, b, h, i, j):
        return logit - slopes[h] * jnp.abs(i - j) + table[jnp.clip(i - j, 0, 1), h]

    return effattn.dot_product_attention(query, key, value, score_mod=score_mod, **options)


def mapped(query, key, value, **options):
    """vmap over the examples, so that no batch axis is left inside."""
    call = functools.partial(effattn.dot_product_attention, **options)
    return jax.vmap(call)(query, key, value)


CASES = {
    "tails": Half(),
    "window and offsets": Half(
        {"batch": (2,), "heads": 1, "queries": 40},
        lambda: {"local_window_size": (37, 5), "query_offset": jnp.array([80, 3]), **TILE},
    ),
    "documents and lengths": Half(
        square(150, heads=1),
        lambda: {
            "segment_ids": jnp.asarray(IDS),
            "key_value_seq_lengths": jnp.array([100]),
            "is_causal": True,
            **TILE,
        },
    ),
    "tables, cap, scale, sink and dropout": Half(
        square(40),
        lambda: {
            "logits_soft_cap": 2.0,
            "is_causal": True,
            "dropout_rate": 0.3,
            "dropout_rng": jax.random.key(1),
            **TILE,
        },
        tabled,
        {"slopes": (2,), "table": (2, 2), "scale": (), "sink": (2,)},
    ),
    "layout of heads": Half({"queries": 40, "key_heads": 2}, lambda: TILE, over_layout((2,), True)),
    "pattern": Half(square(100, heads=1), lambda: {"pattern": PATTERN}, effattn.sparse_attention),
    "blocks off the tiles": Half(
        square(100, heads=1),
        lambda: {"block_mask": np.tri(3, dtype=bool), "block_size": 40, "is_causal": True},
        effattn.block_sparse_attention,
    ),
    "one row, under vmap": Half(
        {"batch": (2,), "heads": 1, "queries": 1, "keys": 1}, lambda: {"is_causal": True}, mapped
    ),
    "heads of 200 and 40": Half(
        {"heads": 1, "queries": 20, "keys": 40, "size": 200, "value_size": 40}
    ),
}


def with_devices(test):
    """Marks a test in which warpgroups wait for each other.

    Each waiting warpgroup blocks a thread of XLA, which has at least one thread for each device.
    """
    has_one = hasattr(plgpu, "InterpretGPUParams")
    reason = "jax 0.12 interprets kernels of Mosaic GPU"
    return pytest.mark.devices(pytest.mark.skipif(not has_one, reason=reason)(test))


def interpreted(case, dtype=np.float16):
    """The case, run by a kernel in which no two warpgroups race for memory."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    with dispatch.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
        found = jax.block_until_ready(case.run("mosaic_gpu", dtype))
    assert not get_races().races_found
    return found


@with_devices
@pytest.mark.parametrize("name", slow_but_for(["documents and lengths"], CASES))
def test_it_agrees_with_float64(name):
    """Checks outputs, log-sum-exps and every gradient."""
    case = CASES[name]
    (out, lse), gradients = interpreted(case)
    (exact_out, exact_lse), exact = block_cases.exact(case)
    assert_close(lse, exact_lse, 1e-5)
    assert_close((out, gradients), (exact_out, exact), 2e-3)


@pytest.mark.slow
@with_devices
def test_errors_are_at_most_twice_those_of_the_plain_form():
    dtype = jnp.bfloat16
    case = Half(
        square(150, heads=1, size=64, value_size=64), lambda: {"is_causal": True}, rounded_to=dtype
    )

    def plain(query, key, value, **_):
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
        logits = jnp.where(jnp.tri(150, dtype=bool), logits.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(logits).astype(value.dtype)
        lse = jax.nn.logsumexp(logits, -1)
        return jnp.einsum("bnts,bsnh->btnh", weights, value), jnp.moveaxis(lse, 1, 2)

    ours = interpreted(case, dtype)
    theirs = dataclasses.replace(case, function=plain).run(None, dtype)
    expected = block_cases.exact(case)
    trees = (jax.tree.leaves(as_float64(tree)) for tree in (ours, theirs, expected))
    for a, b, exact in zip(*trees, strict=True):
        assert rms(a - exact) <= 2 * rms(b - exact)
        assert rms(a - exact) <= 0.005 * rms(exact)


@with_devices
def test_large_gradients_do_not_overflow_in_float16():
    """The gradient of the logits is below the largest float16 times the scale."""
    rng = np.random.default_rng(0)
    arrays = [
        0.1 * rng.normal(size=(1, 64, 1, 64)),
        0.1 * rng.normal(size=(1, 2, 1, 64)),
        rng.normal(size=(1, 2, 1, 64)),
    ]
    arrays = [array.astype(np.float16) for array in arrays]
    large = 6500 * np.sign(rng.normal(size=(1, 64, 1, 64))).astype(np.float32)

    def gradients(arrays, implementation):
        def total(*arrays):
            out = effattn.dot_product_attention(*arrays, implementation=implementation)
            return (out.astype(jnp.float32) * large).sum()

        return jax.grad(total, (0, 1, 2))(*arrays)

    with dispatch.interpreted():
        found = gradients(arrays, "mosaic_gpu")
    expected = gradients([array.astype(np.float32) for array in arrays], "xla")
    assert_close(found, expected, 5e-3)


@pytest.mark.slow
@with_devices
def test_padding_reaches_nothing():
    """Padding holds NaN."""
    arrays = draw(40, 40, heads=1, key_heads=1, size=16, value_size=16, dtype=np.float16)
    lengths = np.array([40, 33])
    known = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}

    def function(arrays, known):
        return attend(**arrays, **known, is_causal=True, return_residual=True)

    with dispatch.interpreted():
        clean = with_gradients(function, arrays, known)
        for array in arrays.values():
            array[1, 33:] = np.nan
        spoilt = with_gradients(function, arrays, known)
    jax.tree.map(np.testing.assert_array_equal, spoilt, clean)


def test_older_versions_of_jax_do_not_interpret_it(monkeypatch):
    monkeypatch.delattr(plgpu, "InterpretGPUParams", raising=False)
    with dispatch.interpreted():
        with pytest.raises(NotImplementedError, match="interpreted by jax 0.12 and later"):
            attend(**draw(dtype=np.float16))


# Lowered


def gradients(case):
    """The outputs and gradients of a case, as a function of its arrays."""
    call = functools.partial(
        case.function, **case.options(), implementation="mosaic_gpu", return_residual=True
    )

    def function(arrays):
        results, pull_back = jax.vjp(lambda arrays: call(**arrays), arrays)
        return results, pull_back(cotangents(arrays))

    return function


LOWERED = (
    "documents and lengths",
    "tables, cap, scale, sink and dropout",
    "layout of heads",
    "blocks off the tiles",
    "one row, under vmap",
)


@pytest.mark.parametrize("name", slow_but_for(["documents and lengths"], LOWERED))
def test_it_is_lowered_for_gpus(name):
    case = CASES[name]
    if jax.__version_info__ < (0, 12) and "logits_soft_cap" in case.options():
        pytest.skip("jax 0.12 lowers the gradient of a soft cap")
    assert kernels_of(gradients(case), case.arrays()) == {MOSAIC_GPU}


SIZES = (64, 64), (128, 80), (192, 256)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_every_size_is_lowered_for_gpus(sizes):
    """Lowering checks that the largest tiles fit into shared memory."""
    case = Half(
        square(1000, size=sizes[0], value_size=sizes[1]),
        lambda: {"is_causal": True},
        rounded_to=jnp.bfloat16,
    )
    assert kernels_of(gradients(case), case.arrays(jnp.bfloat16)) == {MOSAIC_GPU}


@pytest.mark.slow
def test_under_shard_map_it_is_lowered_for_gpus():
    mesh, spec = mesh_of((2, 2), ("batch", "heads"), "cuda"), PartitionSpec("batch", None, "heads")

    def total(*arrays):
        return attend(*arrays, is_causal=True).astype(jnp.float32).sum()

    function = jax.shard_map(
        jax.grad(total, (0, 1, 2)), mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3
    )
    query = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(query, key, key).lower(lowering_platforms=("cuda",))
    assert MOSAIC_GPU in lowered.as_text()


def test_many_examples_are_lowered_for_gpus():
    """CUDA limits two of the three axes of a grid to 65,535 blocks."""
    array = jax.ShapeDtypeStruct((2**16, 1, 1, 64), np.float16)
    assert kernels_of(attend, array, array, array) == {MOSAIC_GPU}


# Order of the blocks


@pytest.mark.parametrize(
    "sizes", [(2, 3, 4, 5, 6), (5, 1, 1, 7, 2), (1, 4, 2, 1, 3), (3, 3, 1, 2, 9)]
)
def test_each_tile_of_each_head_has_one_block(sizes):
    schedule = Schedule(*sizes)
    places = np.stack(jax.vmap(schedule.at)(np.arange(schedule.size, dtype=np.int32)), 1)
    expected = np.stack(np.indices(sizes[:4]).reshape(4, -1), 1)
    np.testing.assert_array_equal(np.unique(places, axis=0), expected)
    # Within a section, tiles start in the order of their ranks.
    blocks = sizes[4] * sizes[2] * sizes[3]
    for section in np.split(places, range(blocks, len(places), blocks)):
        assert np.all(np.diff(section[:, 3]) >= 0)


def blocks_of(x, of_keys):
    """Costs of the blocks of a causal call, in units of a pair of tiles, in the order of starts."""
    config = Config(tile=x.layout and x.layout.tile, scale=1.0, right=0)
    plan, arrays = block_attention._arrange("key" if of_keys else "forward", config, x)
    rows = types.SimpleNamespace(d_out=arrays.query)
    schedule = schedule_of(plan, arrays, rows, of_keys=of_keys)
    example, _, _, rank = jax.vmap(schedule.at)(np.arange(schedule.size, dtype=np.int32))
    order, walk = np.asarray(arrays.order)[:, 0], [np.asarray(array)[:, 0] for array in arrays.walk]
    visited = walk[0][..., 1] - walk[0][..., 0] if x.layout is None else walk[0] + walk[1]
    example = np.minimum(example, len(order) - 1)
    heads = plan.group if of_keys else 1
    # Loading the own tile and storing the results take about as long as a pair of tiles.
    return visited[example, order[example, rank]] * heads + 1


def finished(costs, processors=132):
    """When the last block ends: each starts on the multiprocessor that is free first."""
    free = [0] * processors
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def operands(batch, length, heads, key_heads, documents=None, size=128):
    def zeros(heads):
        return jnp.zeros((batch, length, heads, size), jnp.bfloat16)

    segments = None
    if documents is not None:
        ids = np.sort(np.random.default_rng(0).integers(1, documents + 1, (batch, length)))
        segments = jnp.asarray(ids), jnp.asarray(ids)
    return Inputs(zeros(heads), zeros(key_heads), zeros(key_heads), segments=segments)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 8192, 16, 16),
        (1, 8192, 32, 8),
        (2, 8192, 8, 8),
        (1, 16_384, 16, 16),
        (2, 16_384, 8, 8, 16),
    ],
)
def test_multiprocessors_of_an_h100_end_at_about_the_same_time(sizes, of_keys):
    costs = blocks_of(operands(*sizes), of_keys)
    assert finished(costs) <= 1.01 * max(costs.sum() / 132, costs.max())


def test_no_section_has_few_blocks():
    """Two sections of three heads would leave one head, whose blocks take long for their number."""
    costs = blocks_of(operands(1, 16_384, 7, 7, size=256), False)
    assert finished(costs) <= 1.02 * costs.sum() / 132


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("heads", [8, 16])
def test_blocks_of_global_tokens_start_first(heads, of_keys):
    """A window of 256 tokens a side, with global tokens in the first tile."""
    near = np.abs(np.subtract.outer(np.arange(64), np.arange(64))) <= 2
    near[0] = near[:, 0] = True
    tile = (64, 128) if of_keys else (128, 128)
    near = near.repeat(128 // tile[0], 0)
    layout = BlockLayout.from_block_mask(near, tile=tile, lengths=(8192, 8192))
    costs = blocks_of(operands(1, 8192, heads, heads)._replace(layout=layout), of_keys)
    assert finished(costs) <= 1.01 * max(costs.sum() / 132, costs.max())


def test_blocks_of_a_section_read_what_the_l2_cache_holds():
    x = operands(1, 8192, 16, 16)
    plan, arrays = block_attention._arrange("forward", Config(tile=None, scale=1.0, right=0), x)
    schedule = schedule_of(plan, arrays, None, of_keys=False)
    assert schedule.at_once * (x.key.nbytes + x.value.nbytes) / 16 <= 32 * 2**20


def test_tiles_start_with_the_longest_with_documents_and_layouts_too():
    x = operands(2, 1024, 1, 1, 4)
    config = Config(tile=None, scale=1.0, right=0)
    _, arrays = block_attention._arrange("forward", config, x)
    ranges, order = np.asarray(arrays.walk[0])[:, 0], np.asarray(arrays.order)[:, 0]
    counts = np.take_along_axis(ranges[..., 1] - ranges[..., 0], order, 1)
    assert np.all(np.diff(counts) <= 0) and np.ptp(counts) > 0
    mask = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]], bool)
    layout = BlockLayout.from_block_mask(mask, tile=(128, 128), lengths=(512, 512))
    _, arrays = block_attention._arrange(
        "forward",
        Config(tile=(128, 128), scale=1.0),
        operands(1, 512, 1, 1)._replace(layout=layout),
    )
    assert np.asarray(arrays.order).ravel().tolist() == [1, 3, 0, 2]


# Refused arguments


def test_elsewhere_it_says_who_takes_the_arguments():
    arrays = draw(dtype=np.float16)
    with pytest.raises(NotImplementedError, match="runs by 'mosaic_gpu' on cuda alone"):
        attend(**arrays)
    both = attend(**arrays, implementation=("mosaic_gpu", "xla"))
    np.testing.assert_array_equal(both, effattn.dot_product_attention(**arrays))


@pytest.mark.parametrize(
    ("dtype", "sizes", "options", "message"),
    [
        (np.float32, {}, {}, "takes bfloat16 and float16, got float32"),
        (np.float64, {}, {}, "takes bfloat16 and float16, got float64"),
        (np.float16, {"size": 257}, {}, "takes head sizes up to 256, got 257 and 5"),
        (np.float16, {}, {"tile": (64, 32)}, r"takes tiles of multiples of 64 .* got \(64, 32\)"),
        (np.float16, {}, {"mask": np.ones((11, 14), bool)}, "takes no dense mask"),
        (np.float16, {}, {"bias": np.ones((11, 14), np.float32)}, "takes no dense bias"),
    ],
)
def test_what_it_does_not_take_another_does(dtype, sizes, options, message):
    with jax.enable_x64(True):
        arrays = draw(**sizes, dtype=dtype)
        with pytest.raises(NotImplementedError, match=f"{message}.*implementation='xla' takes"):
            attend(**arrays, **options)
        both = attend(**arrays, **options | {"implementation": ("mosaic_gpu", "xla")})
        np.testing.assert_array_equal(both, effattn.dot_product_attention(**arrays, **options))


@pytest.mark.parametrize(
    "options", [{"logits_soft_cap": 2.0}, {"score_mod": lambda logit, b, h, i, j: logit * logit}]
)
def test_older_versions_of_jax_take_no_functions_of_logits(monkeypatch, options):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    with pytest.raises(NotImplementedError, match="needs jax 0.12 for a soft cap or a score_mod"):
        attend(**draw(dtype=np.float16), **options)


def test_what_it_does_not_take_triton_does_on_the_same_device():
    arrays = draw(70, 70, size=64, value_size=64, dtype=np.float16)
    bias = np.ones((70, 70), np.float16)

    def function(bias, arrays):
        return attend(**arrays, bias=bias, implementation="pallas")

    assert kernels_of(function, None, arrays) == {MOSAIC_GPU}
    assert kernels_of(function, bias, arrays) == {TRITON}


@pytest.mark.parametrize(
    ("block_size", "is_causal", "message"),
    [(32, False, "takes up to 16 entries, got 256"), (128, False, None), (128, True, None)],
)
def test_masks_of_blocks_smaller_than_a_tile_are_refused(block_size, is_causal, message):
    """The kernel would compare every logit with all entries, slower than exact attention."""
    array = jax.ShapeDtypeStruct((1, 512, 1, 64), np.float16)
    blocks = 512 // block_size

    def call(query, key, value, implementation):
        return effattn.block_sparse_attention(
            query,
            key,
            value,
            block_size=block_size,
            block_mask=np.arange(blocks)[:, None] // 2 != np.arange(blocks) // 3,
            is_causal=is_causal,
            implementation=implementation,
        )

    refused = pytest.raises(NotImplementedError, match=message) if message else nullcontext()
    with refused:
        jax.eval_shape(functools.partial(call, implementation="mosaic_gpu"), array, array, array)
    jax.eval_shape(functools.partial(call, implementation="triton"), array, array, array)


@pytest.mark.parametrize(
    ("capability", "cuda", "message"),
    [
        ("9.0", "cuda 12060", None),
        ("9.0", "cuda 12091", None),
        ("9.0", "cuda 13000", None),
        ("8.0", "cuda 12060", r"compute capability 9\.x \(Hopper\), got 8\.0"),
        ("10.0", "cuda 12091", r"compute capability 9\.x \(Hopper\), got 10\.0"),
        ("9.0", "cuda 12080", r"CUDA version outside 12\.8\.0 to 12\.9\.0, .* got 12\.8\.0"),
        ("9.0", "cuda 12090", r"CUDA version outside 12\.8\.0 to 12\.9\.0, .* got 12\.9\.0"),
    ],
)
def test_which_devices_and_versions_of_cuda_it_takes(monkeypatch, capability, cuda, message):
    device = types.SimpleNamespace(
        compute_capability=capability,
        client=types.SimpleNamespace(platform_version=f"PJRT C API\n{cuda}"),
    )
    monkeypatch.setattr(jax, "local_devices", lambda backend: {"cuda": [device]}[backend])
    arrays = draw(dtype=np.float16)
    if message is None:
        jax.eval_shape(lambda arrays: attend(**arrays), arrays)
        return
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda arrays: attend(**arrays), arrays)
