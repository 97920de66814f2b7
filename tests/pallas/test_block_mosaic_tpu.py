"""Block attention for TPUs: interpreted, against float64; and lowered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import effattn
from effattn import dispatch, patterns
from effattn.analysis import cost
from effattn.cores.block_attention import block_attention
from effattn.interfaces.block_attention import Config, Inputs
from effattn.pallas import block_tiles, visited_tiles
from effattn.pallas.mosaic_tpu import steps
from effattn.testing.functions import assert_close
from tests.dense import cotangents, draw
from tests.marks import slow_but_for
from tests.pallas import block_cases
from tests.pallas.block_cases import CASES, QUICK, Case, over_layout, square
from tests.pallas.lowering import MOSAIC_TPU, kernels_of

attend = functools.partial(effattn.dot_product_attention, implementation="mosaic_tpu")

# Tiles of 128: two tiles of queries and two of keys, the second ragged, at the length of 150.
TILE = {"tile": (128, 128)}
NAMES = (
    "one row",
    "batch axes",
    "heads of 200 and 40",
    "window",
    "mask and lengths",
    "documents",
    "bias of keys",
    "tables, cap, scale and sink",
    "dropout and a bias",
    "layout of heads",
    "vmap",
)


def for_tpus(case: Case) -> Case:
    # Without other sizes, a case has as many queries as keys.
    sizes = {} if case.more or case.sizes or "mask" in case.options() else square()
    return dataclasses.replace(
        case, sizes=case.sizes | sizes, options=lambda: case.options() | TILE
    )


@pytest.mark.slow
def test_rows_that_a_finite_bias_masks_have_their_gradients():
    case = for_tpus(block_cases.BLURRED)
    ours = block_cases.interpreted(case, "mosaic_tpu")
    assert_close(ours, case.run("xla", np.float32), 1e-5)


def in_pattern():
    pattern = patterns.SlidingWindow(20, 0) | patterns.Global(9)
    return {"pattern": pattern, **TILE}


SELECTED = {name: for_tpus(CASES[name]) for name in NAMES}
SELECTED["pattern"] = Case(square(), in_pattern, effattn.sparse_attention)


@functools.cache
def interpreted(name):
    return block_cases.interpreted(SELECTED[name], "mosaic_tpu")


@pytest.mark.parametrize("name", slow_but_for(QUICK, SELECTED))
def test_it_agrees_with_float64(name):
    """Checks outputs, log-sum-exps and every gradient."""
    assert_close(interpreted(name), block_cases.exact(SELECTED[name]), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents", "layout of heads", "window", "one row"])
def test_it_has_no_races_and_reads_nothing_that_was_not_written(name):
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with dispatch.interpreted(params):
        found = SELECTED[name].run("mosaic_tpu", np.float32)
    jax.tree.map(np.testing.assert_array_equal, found, interpreted(name))


@pytest.mark.parametrize("name", slow_but_for([*QUICK, "pattern"], SELECTED))
def test_it_is_lowered_for_tpus(name):
    case = SELECTED[name]
    call = functools.partial(
        case.function, **case.options(), implementation="mosaic_tpu", return_residual=True
    )

    def function(arrays):
        results, pull_back = jax.vjp(lambda arrays: call(**arrays), arrays)
        return results, pull_back(cotangents(arrays))

    assert kernels_of(function, case.arrays(np.float32), platform="tpu") == {MOSAIC_TPU}


def grids(options, queries=1000):
    """The grids of the three kernels of a call with 1000 keys, forward and backward."""
    query, key = (
        jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
        for length, heads in ((queries, 4), (1000, 2))
    )

    def total(*arrays):
        return attend(*arrays, **options, **TILE).sum()

    def of(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["grid_mapping"].grid
            else:
                for inner in cost.inner_jaxprs(equation):
                    yield from of(inner)

    gradients = jax.grad(total, (0, 1, 2))
    return [*of(jax.make_jaxpr(gradients)(query, key, key).jaxpr)]


def test_kernels_visit_only_tiles_with_pairs_if_these_are_known():
    """Eight tiles a side; the kernel of keys visits each tile for two query heads.

    A step visits up to four tiles, where this copies few tiles in vain.
    """
    causal = 1 + 1 + 2 + 2 + 3 + 3 + 4 + 4  # pairs of tiles
    assert grids({"is_causal": True}) == [(1, 4, causal), (1, 4, causal), (1, 2, 2 * causal)]
    window = {"is_causal": True, "local_window_size": (127, 0)}
    assert grids(window) == [(1, 4, 15), (1, 4, 15), (1, 2, 30)]
    assert grids({}) == [(1, 4, 16), (1, 4, 16), (1, 2, 32)]
    # Keys that no query sees have a step that writes their gradients.
    early = grids({"is_causal": True}, queries=256)
    assert early == [(1, 4, 3), (1, 4, 3), (1, 2, 2 * (2 + 1 + 6))]


OFFSETS = {
    "causal": {"is_causal": True},
    "bidirectional": {},
    "window": {"local_window_size": (300, 140)},
    "later queries": {"is_causal": True, "query_offset": 200},
    "nothing to see": {"is_causal": True, "query_offset": -300},
}


@pytest.mark.parametrize("name", slow_but_for(["window", "bidirectional"], OFFSETS))
def test_steps_that_visit_several_tiles_agree_with_float64(name):
    case = Case(square(900, size=8, value_size=8), lambda: OFFSETS[name] | TILE)
    assert_close(block_cases.interpreted(case, "mosaic_tpu"), block_cases.exact(case), 1e-5)


def test_each_visited_pair_is_in_one_step_and_has_a_mask_where_it_needs_one():
    rng = np.random.default_rng(0)
    for _ in range(30):
        length, tile = rng.integers(1, 1500), int(rng.choice([128, 256]))
        query = jnp.zeros((1, length, 2, 8))
        left = None if rng.random() < 0.5 else int(rng.integers(0, 600))
        right = None if rng.random() < 0.3 else int(rng.integers(0, 400))
        config = Config(
            tile=None, scale=1.0, left=left, right=right, offset=int(rng.integers(-300, 300))
        )
        x = Inputs(query, query[:, :, :1], query[:, :, :1])
        plan, arrays = block_tiles.arrange(config, x, (tile, tile))
        for of_keys in (False, True):
            ranges = visited_tiles.known_ranges(plan, arrays, x, of_keys=of_keys)
            grid, order = steps.grid_of(plan, arrays, x, of_keys=of_keys)
            found = {}
            for number in range(grid.axes[0]):
                step = steps.at_step(plan, of_keys, grid, 0, 0, number, None, *order)
                own, other = (step.m, step.n) if of_keys else (step.n, step.m)
                for place in _visits(step):
                    pair = int(own), int(other) * grid.at_once + place[0], int(step.h)
                    assert pair not in found
                    found[pair] = place[1]
            expected = {
                (own, other, head): not first <= other < stop
                for own, (low, high, first, stop) in enumerate(ranges.tolist())
                for other in range(low, high)
                for head in range(2 if of_keys else 1)
            }
            assert found == expected
            assert grid.visited == len(expected)


def _visits(step):
    """Places of the tiles that a step visits, and whether they need a mask."""
    if step.parts is None:
        return [(0, bool(step.masked))] if step.visited else []
    count, place = step.parts.masked
    whole = range(int(step.parts.first), int(step.parts.stop))
    return [*((n, False) for n in whole), *((int(place(n)), True) for n in range(int(count)))]


def test_unknown_tiles_have_a_step_for_each_pair():
    lengths = {"is_causal": True, "key_value_seq_lengths": jnp.array([900])}
    assert grids(lengths) == [(1, 4, 8, 8), (1, 4, 8, 8), (1, 2, 8, 2, 8)]


@pytest.mark.parametrize(
    ("dtype", "sizes", "options", "message"),
    [
        (jnp.float16, {}, {}, "takes float32 and bfloat16, got float16"),
        (np.float32, {"size": 257}, {}, "takes head sizes up to 256, got 257 and 5"),
        (np.float32, {}, {"tile": (128, 64)}, r"takes tiles of multiples of 128 .* \(128, 64\)"),
    ],
)
def test_what_it_does_not_take_another_does(dtype, sizes, options, message):
    arrays = draw(**sizes, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"{message}.*implementation='xla' takes"):
        attend(**arrays, **options)
    both = attend(**arrays, **options | {"implementation": ("mosaic_tpu", "xla")})
    np.testing.assert_array_equal(both, effattn.dot_product_attention(**arrays, **options))


def test_a_layout_that_scalar_memory_does_not_hold_is_refused():
    arrays = {
        name: jax.ShapeDtypeStruct((1, 2**16, 2, 64), jnp.bfloat16)
        for name in ("query", "key", "value")
    }
    function = functools.partial(
        over_layout((), False, implementation="mosaic_tpu"), tile=(128, 128)
    )
    with pytest.raises(NotImplementedError, match="layouts of up to 131072 counts and indices"):
        jax.eval_shape(lambda arrays: function(**arrays), arrays)


def test_a_packed_batch_that_scalar_memory_does_not_hold_is_refused():
    """Calls whose tiles do not depend on the example are taken."""

    def call(packed, rows=2**15, length=512):
        arrays = {
            name: jax.ShapeDtypeStruct((rows, length, 1, 64), jnp.bfloat16)
            for name in ("query", "key", "value")
        }
        ids = jnp.ones((rows, length), jnp.int32)
        given = {"segment_ids": ids} if packed else {}
        jax.eval_shape(lambda arrays: attend(**arrays, is_causal=True, **given), arrays)

    with dispatch.interpreted():
        call(packed=True)
        call(packed=False, rows=2**17)
        with pytest.raises(NotImplementedError, match="32768 tiles of 512 .* 32769 examples of 1"):
            call(packed=True, rows=2**15 + 1)
        with pytest.raises(NotImplementedError, match="got 32768 examples of 2 tiles"):
            call(packed=True, length=513)


def test_gathered_tokens_may_be_anywhere_in_a_window():
    """A tile of gathered tokens can reach more key tiles than a tile of contiguous tokens."""
    arrays = draw(128, 640, batch=(1,), size=16, value_size=16, dtype=np.float32)
    at = np.sort(np.random.default_rng(0).permutation(640)[:128])[None]
    known = {"positions": (jnp.asarray(at), jnp.arange(640)[None])}

    def run(implementations):
        config = Config(
            tile=(128, 128), scale=0.25, left=20, right=20, implementations=implementations
        )
        return block_attention(config, Inputs(**arrays, **known))

    ours = run(dispatch.Chosen(("mosaic_tpu",), interpreted=True))
    assert_close(ours, run(dispatch.XLA), 1e-5)
