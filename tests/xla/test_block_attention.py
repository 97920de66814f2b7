"""The core alone: layouts, dropout, tiles, and the cost of tracing and rematerialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import dot_product_attention, sliding_window_attention
from effattn.arrays import dtypes
from effattn.cores import block_attention as core
from effattn.cores.block_attention import block_attention
from effattn.interfaces.block_attention import Attended, Config, Inputs
from effattn.patterns.layouts import BlockLayout
from effattn.testing.functions import assert_close
from effattn.xla import tiling, walks
from effattn.xla.block_tiles import Tiles
from tests.dense import cotangents, dense_with_gradients, draw, with_gradients
from tests.marks import slow

TILE = (4, 5)
# Query tiles by key tiles; one query tile visits nothing, and one key tile is never visited.
BLOCKS = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0]], bool)


def over_layout(arrays, known, **config):
    config = Config(tile=TILE, scale=3**-0.5, key_tiles=2, **config)
    out, lse = block_attention(config, Inputs(**arrays, **known))
    return out, dtypes.logarithms(lse)


@pytest.mark.parametrize("is_causal", [False, slow(True)])
def test_a_layout_is_a_mask_at_tile_grain_with_gradients(is_causal, x64):
    arrays = draw()
    known = {"layout": BlockLayout.from_block_mask(BLOCKS, tile=TILE, lengths=(11, 14))}
    mask = BLOCKS.repeat(TILE[0], 0).repeat(TILE[1], 1)[:11, :14]
    expected = dense_with_gradients(arrays, mask=mask[None, None], is_causal=is_causal)
    function = functools.partial(over_layout, right=0 if is_causal else None)
    results = with_gradients(function, arrays, known)
    assert_close(results, expected, 1e-12)

    # Tiles that are not visited are not read.
    spoilt = {k: a if k == "query" else a.copy() for k, a in arrays.items()}
    spoilt["key"][:, 10:], spoilt["value"][:, 10:] = np.nan, np.nan
    jax.tree.map(np.testing.assert_array_equal, with_gradients(function, spoilt, known), results)


def over_blocks(blocks, full, present, arrays, known=None):
    layout = BlockLayout.from_block_mask(blocks, full=full, tile=TILE, lengths=(11, 14))
    return over_layout(arrays, {"layout": layout, "key_mask": present}, right=3, offset=2)


@jax.jit
def over_blocks_with_gradients(blocks, full, present, arrays, cotangents):
    """`over_blocks` with gradients, compiled once for all blocks of a shape."""
    results, pull_back = jax.vjp(functools.partial(over_blocks, blocks, full, present), arrays)
    return results, pull_back(cotangents)[0]


@pytest.mark.slow
@pytest.mark.parametrize("leading", [(2,), (1, 2), (3, 1), (3, 2)])
def test_a_layout_may_differ_by_key_head_and_example(leading, x64):
    arrays = draw(batch=(3,))
    rng = np.random.default_rng(0)
    blocks, full = rng.random((2, *leading, *BLOCKS.shape)) < 0.6
    full &= blocks
    present = rng.random((3, 14)) < 0.8
    found = with_gradients(functools.partial(over_blocks, blocks, full, present), arrays)
    found = jax.tree.map(np.asarray, found)
    blocks, full = (np.broadcast_to(array, (3, 2, *BLOCKS.shape)) for array in (blocks, full))
    for b, k in np.ndindex(3, 2):

        def alone(name, array, b=b, k=k):
            heads = slice(2 * k, 2 * k + 2) if name in ("query", "out") else slice(k, k + 1)
            return array[b : b + 1, :, heads]

        expected = over_blocks_with_gradients(
            blocks[b, k],
            full[b, k],
            present[b : b + 1],
            {name: alone(name, array) for name, array in arrays.items()},
            tuple(alone("out", array) for array in cotangents(arrays)),
        )
        results, gradients = found
        results = tuple(alone("out", array) for array in results)
        gradients = {name: alone(name, array) for name, array in gradients.items()}
        assert_close((results, gradients), expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(4, 5), (100, 100)])
def test_dropout_is_the_same_in_every_tile_and_in_the_backward(tile, x64):
    arrays = draw()
    options = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(5), "query_offset": 3}

    def function(arrays, known):
        return dot_product_attention(**arrays, **options, tile=tile, return_residual=True)

    expected = dense_with_gradients(arrays, **options)
    assert_close(with_gradients(function, arrays), expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("offset, keys", [(0, 64), (32, 100)])
def test_a_diagonal_through_the_corners_of_tiles(offset, keys, x64, monkeypatch):
    """Small tiles, because large tiles take too long."""
    monkeypatch.setattr(walks, "_SMALLEST_STAIR", 16)
    arrays = draw(queries=64, keys=keys)
    rng = np.random.default_rng(0)
    arrays["bias"] = rng.normal(size=(1, 4, 64, keys))
    segments = tuple(np.arange(n)[None].repeat(2, 0) // 45 for n in (64, keys))
    options = {
        "segment_ids": segments,
        "is_causal": True,
        "query_offset": offset,
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(5),
        "logits_soft_cap": 3.0,
    }

    def function(arrays, known):
        return dot_product_attention(**arrays, **options, tile=(32, 16), return_residual=True)

    expected = dense_with_gradients(arrays, **options)
    assert_close(with_gradients(function, arrays), expected, 1e-12)


@pytest.fixture
def calls(monkeypatch):
    """The configurations of the core's calls, with the tiles forward and backward."""
    seen = []

    def spy(config, x):
        walks = [Tiles(config, x, backward=backward).walk for backward in (False, True)]
        seen.append((config, *(walk.tile for walk in walks)))
        return block_attention(config, x)

    monkeypatch.setattr(core, "block_attention", spy)
    return seen


def shapes(length, batch=(1,), heads=4, size=64):
    return (jax.ShapeDtypeStruct((*batch, length, heads, size), jnp.float32),) * 3


def test_tiles_are_those_asked_for_or_chosen_from_the_shapes(calls):
    jax.eval_shape(functools.partial(dot_product_attention, tile=(7, 9)), *shapes(100))
    jax.eval_shape(dot_product_attention, *shapes(3000, batch=(2, 8)))
    window = functools.partial(sliding_window_attention, local_window_size=(100, 0))
    jax.eval_shape(window, *shapes(3000))
    chosen = [((3000, 3000), 64, None, None), ((3000, 3000), 4, 100, 0)]
    _, *tiles = zip(*calls, strict=True)
    for seen, backward in zip(tiles, (False, True), strict=True):
        assert seen == ((7, 9), *(tiling.choose_tile(*c, backward=backward) for c in chosen))


def test_equal_calls_are_equal_programs(calls):
    for _ in range(2):
        call = functools.partial(sliding_window_attention, local_window_size=3, dilation=2)
        jax.eval_shape(functools.partial(call, query_offset=4), *shapes(20))
    assert calls[0] == calls[1] and hash(calls[0]) == hash(calls[1])


VARIANTS = {
    "exact": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (255, 0)},
    "wide window": {"local_window_size": 4000, "query_offset": 2},
    "dilated": {"local_window_size": (255, 0), "dilation": 3},
    "dropout": {"dropout_rate": 0.5, "is_causal": True},
}


def gradient_program(length, *, policy=None, **options):
    attend = sliding_window_attention if "dilation" in options else dot_product_attention
    if "dropout_rate" in options:
        options["dropout_rng"] = jax.random.key(0)

    def loss(*args):
        return attend(*args, **options).sum()

    loss = loss if policy is None else jax.checkpoint(loss, policy=policy)
    return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes(length)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_program_is_no_larger_for_longer_sequences(variant):
    short, long = (gradient_program(n, **VARIANTS[variant]) for n in (9 * 1024 + 3, 2**20 + 2))
    assert short.count(" = ") == long.count(" = ") > 50


def test_saving_what_the_names_say_saves_the_forward():
    saved = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    again = jax.checkpoint_policies.nothing_saveable
    products = [
        gradient_program(2000, policy=policy, is_causal=True).count("dot_general")
        for policy in (None, saved, again)
    ]
    assert products[0] == products[1] < products[2]


@pytest.mark.parametrize("precision", [jax.lax.Precision.HIGHEST, "high"])
def test_precision_is_that_of_every_product(precision):
    program = gradient_program(2000, precision=precision)
    name = f"Precision.{jax.lax.Precision(precision).name}"
    assert program.count("dot_general") == program.count(f"precision=({name}, {name})") > 0


@pytest.mark.parametrize("batch, length", [(2, 8), slow(2, 16), slow(1, 8), (3, 33)])
def test_bfloat16_runs_at_every_size(batch, length):
    """XLA's CPU runtime refuses some bfloat16 products that accumulate in float32."""
    x = np.ones((batch, length, 2, 4), jnp.bfloat16)

    @jax.jit
    def with_gradients(query, key, value):
        attend = functools.partial(dot_product_attention, is_causal=True)
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, pull_back(out)

    out, gradients = with_gradients(x, x, x)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_rounding_takes_from_an_output_is_saved_beside_it(dtype):
    rng = np.random.default_rng(3)
    wide = jnp.asarray(rng.normal(size=(40, 2, 8)), jnp.float32)
    arrays = 3 * [wide.astype(dtype)]

    @jax.jit
    def rounded(out):
        return Attended.of(Inputs(*arrays), out, out[..., 0], out[..., 0])

    found = rounded(wide)
    assert found.out.dtype == found.out_error.dtype == dtype
    both = found.out.astype(jnp.float32) + found.out_error
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(both, wide, rtol=eps**2, atol=1e-7)
    _, pull_back = jax.vjp(dot_product_attention, *arrays)
    assert {x.dtype for x in jax.tree.leaves(pull_back) if x.ndim > 2} == {jnp.dtype(dtype)}


def test_without_jit_it_is_the_same():
    """The last tile of keys shares one key with the tile before it."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(5, 1, 2)).astype(np.float32) for _ in range(3)]
    attend = functools.partial(dot_product_attention, is_causal=True, tile=(5, 2))
    with jax.disable_jit():
        plain = attend(*arrays)
    np.testing.assert_allclose(plain, jax.jit(attend)(*arrays), rtol=1e-5, atol=1e-6)
