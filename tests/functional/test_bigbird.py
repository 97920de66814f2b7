"""BigBird, random and block-sparse attention against their patterns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import bigbird_attention, block_sparse_attention, random_attention
from effattn.patterns import BlockMask, Causal, RandomBlocks, SlidingWindow, bigbird
from effattn.testing.functions import assert_close
from tests.dense import dense_with_gradients, draw, with_gradients
from tests.marks import slow

LENGTH, SIZE, KEY_HEADS = 30, 4, 2
BLOCKS = -(-LENGTH // SIZE)


pytestmark = pytest.mark.usefixtures("x64")


def by_head(mask_of, heads=4):
    """`(N, T, T)`: for each query head, the mask of its key head."""
    return np.stack([mask_of(n * KEY_HEADS // heads) for n in range(heads)])


def only_what_is_seen(arrays):
    return lambda logit, b, h, i, j: jnp.where(arrays["seen"][h, i, j] > 0, logit, -jnp.inf)


def dense(arrays, mask, **given):
    """The definition over the pairs of a mask `(N, T, S)`, compiled once for all masks."""
    arrays = {**arrays, "seen": mask.astype(float)}
    results, gradients = dense_with_gradients(arrays, score_mod_of=only_what_is_seen, **given)
    return results, {name: x for name, x in gradients.items() if name != "seen"}


def agree(function, arrays, mask, **given):
    """Checks outputs, log-sum-exps and gradients."""

    def attend(arrays, known):
        return function(**arrays, **given, return_residual=True)

    assert_close(with_gradients(attend, arrays), dense(arrays, mask, **given), 1e-12)


PADDED = {
    "query_seq_lengths": np.array([LENGTH, 19]),
    "key_value_seq_lengths": np.array([LENGTH, 19]),
    "dropout_rate": 0.3,
    "logits_soft_cap": 2.0,
}


@pytest.mark.parametrize(
    "is_causal, ends, window, random",
    [(False, (1, 1), 1, 2), (True, (2, 0), 5, 1)],
)
@pytest.mark.slow
def test_each_key_head_draws_the_pattern_of_its_seed(is_causal, ends, window, random):
    options = {"num_window_blocks": window, "num_random_blocks": random}
    options |= {"num_global_blocks": ends}
    function = functools.partial(bigbird_attention, block_size=SIZE, seed=7, **options)

    def mask_of(k):
        return bigbird(SIZE, **options, seed=7 + k, causal=is_causal).mask(LENGTH)

    given = {**PADDED, "dropout_rng": jax.random.key(1), "is_causal": is_causal}
    agree(function, draw(LENGTH, LENGTH), by_head(mask_of), **given)


@pytest.mark.slow
def test_blocks_given_may_repeat_what_is_there_and_be_traced():
    table = np.random.default_rng(0).integers(-1, BLOCKS, (KEY_HEADS, BLOCKS, 3))
    arrays = draw(LENGTH, LENGTH)

    def mask_of(k):
        drawn = np.zeros((BLOCKS, BLOCKS + 1), bool)
        np.put_along_axis(drawn, table[k], True, axis=1)
        near = abs(np.arange(BLOCKS) - np.arange(BLOCKS)[:, None]) <= 1
        either = drawn[:, :BLOCKS] | near
        either[[0, -1]] = either[:, [0, -1]] = True
        return BlockMask(either, SIZE).mask(LENGTH)

    def traced(arrays, table):
        return bigbird_attention(
            **arrays,
            block_size=SIZE,
            num_global_blocks=(1, 1),
            random_blocks=table,
            return_residual=True,
        )

    expected = dense(arrays, by_head(mask_of))
    assert_close(with_gradients(traced, arrays, table), expected, 1e-12)
    known = jax.jit(functools.partial(traced, table=table))(arrays)
    assert_close(known, expected[0], 1e-12)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_table_of_narrow_integers_gives_the_same_blocks(dtype):
    table = np.random.default_rng(0).integers(0, 100, (150, 2))
    arrays = draw(300, 300, dtype=np.float32)

    def run(arrays, table):
        return bigbird_attention(**arrays, block_size=2, random_blocks=table)

    expected = run(arrays, table)
    for call in (run, jax.jit(run)):
        np.testing.assert_allclose(call(arrays, table.astype(dtype)), expected, atol=1e-6)


def test_a_table_for_longer_sequences_serves_shorter_ones():
    table = np.array([[4, 1], [0, 3], [1, -1], [2, 0], [1, 0]])
    arrays = draw(3 * SIZE, 3 * SIZE)
    short = np.array([[-1, 1], [0, -1], [1, -1]])
    of_long, of_short = (
        jax.jit(functools.partial(random_attention, block_size=SIZE, random_blocks=blocks))
        for blocks in (table, short)
    )
    assert_close(of_long(**arrays), of_short(**arrays), 1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_random_attention_sees_its_own_block_and_those_drawn(is_causal):
    def mask_of(k):
        drawn = RandomBlocks(SIZE, 2, seed=k, causal=is_causal, window=1)
        pattern = SlidingWindow(0, 0, SIZE) | drawn
        return (pattern & Causal() if is_causal else pattern).mask(LENGTH)

    function = functools.partial(random_attention, block_size=SIZE, num_random_blocks=2)
    agree(function, draw(LENGTH, LENGTH), by_head(mask_of), is_causal=is_causal)


@pytest.mark.parametrize(
    "kind, is_causal",
    [
        slow("shared", True),
        slow("by head", False),
        ("traced", False),
        slow("traced by key head", False),
        slow("traced by key head", True),
    ],
)
def test_blocks_of_a_mask(kind, is_causal):
    """A mask of 7 x 8 blocks: one for all heads, one a head, or one computed by the model."""
    shape = {"shared": (), "traced": (), "by head": (4,), "traced by key head": (2,)}[kind]
    blocks = np.random.default_rng(0).random((*shape, 7, BLOCKS)) < 0.5
    arrays = draw(27, LENGTH)
    wide = blocks.repeat(SIZE, -1).repeat(SIZE, -2)[..., :27, :LENGTH]
    mask = wide.reshape(-1, 27, LENGTH)
    mask = mask.repeat(4 // len(mask), axis=0)

    def attend(arrays, known):
        return block_sparse_attention(
            **arrays,
            block_size=SIZE,
            block_mask=known.get("mask", blocks),
            is_causal=is_causal,
            return_residual=True,
        )

    known = {"mask": blocks} if "traced" in kind else {}
    expected = dense(arrays, mask, is_causal=is_causal)
    assert_close(with_gradients(attend, arrays, known), expected, 1e-12)


def test_a_rule_of_blocks_holds_at_any_length():
    def rule(m, n):
        return (m + n) % 3 == 0

    for length in (9, 17):
        arrays = draw(length, length)
        blocks = -(-length // SIZE)
        mask = rule(np.arange(blocks)[:, None], np.arange(blocks))
        of_rule, of_mask = (
            jax.jit(functools.partial(block_sparse_attention, block_size=SIZE, block_mask=given))
            for given in (rule, mask)
        )
        assert_close(of_rule(**arrays), of_mask(**arrays), 1e-15)


@pytest.mark.parametrize(
    "function, options",
    [
        (bigbird_attention, {"is_causal": True}),
        (random_attention, {"is_causal": True}),
        (bigbird_attention, {"is_causal": False}),
        (random_attention, {"is_causal": False}),
        (block_sparse_attention, {"block_mask": lambda m, n: m >= n}),
    ],
)
def test_without_tokens_there_is_nothing(function, options):
    attend = functools.partial(function, block_size=SIZE, return_residual=True, **options)
    out, lse = jax.jit(attend)(**draw(0, 0))
    assert out.shape == (2, 0, 4, 5) and lse.shape == (2, 0, 4)


def test_without_keys_there_are_zeros():
    options = {"block_size": SIZE, "block_mask": np.zeros((2, 0), bool)}
    out = jax.jit(functools.partial(block_sparse_attention, **options))(**draw(5, 0))
    np.testing.assert_array_equal(out, np.zeros((2, 5, 4, 5)))


def arguments(**given):
    return {**draw(32, 32), "block_size": 4, **given}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bigbird_attention(**arguments(block_size=0)), "block_size must be an int, 1 or m"),
        (lambda: bigbird_attention(**arguments(num_window_blocks=2)), "must be odd, got 2"),
        (lambda: bigbird_attention(**arguments(num_global_blocks=-1)), "num_global_blocks .* -1"),
        (
            lambda: bigbird_attention(**arguments(num_random_blocks=9)),
            "num_random_blocks must be at most 8, the number of key blocks of 4 .*, got 9",
        ),
        (
            lambda: random_attention(**arguments(num_random_blocks=9)),
            "num_random_blocks must be at most 8, the number of key blocks of 4 .*, got 9",
        ),
        (
            lambda: bigbird_attention(**arguments(random_blocks=np.zeros((7, 2), int))),
            r"random_blocks must be integers of shape \(n, r\) or \(2, n, r\), .* n at least 8, "
            r".* \(7, 2\)",
        ),
        (
            lambda: bigbird_attention(**arguments(random_blocks=np.full((8, 2), 8))),
            "random_blocks must hold block indices from 0 to 7, or -1 for no block, got 8 to 8",
        ),
        (
            lambda: block_sparse_attention(**arguments(block_mask=np.ones((8, 7), bool))),
            r"block_mask must be bool of shape \(8, 8\), .* got bool of shape \(8, 7\)",
        ),
        (
            lambda: jax.jit(
                lambda mask: block_sparse_attention(**arguments(block_mask=mask)),
            )(jnp.ones((4, 8, 8), bool)),
            "for the 2 key heads of a traced mask, got bool of shape",
        ),
        (
            lambda: bigbird_attention(**{**arguments(), **draw(32, 28)}),
            "bigbird_attention is self-attention",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


PACKED = np.repeat([5, 1, 2, 7, 3], [9, 1, 2, 13, 5])[None]
TABLE = np.array([[2], [3], [0], [1], [6], [4], [5], [7]])


@pytest.mark.parametrize(
    "attend, is_causal",
    [
        (functools.partial(bigbird_attention, num_random_blocks=1, seed=3), True),
        (
            functools.partial(bigbird_attention, num_global_blocks=(1, 1), random_blocks=TABLE),
            False,
        ),
        (functools.partial(block_sparse_attention, block_mask=lambda m, n: (m + n) % 3 > 0), False),
    ],
    ids=["drawn", "table", "rule"],
)
def test_packed_documents_have_the_blocks_that_they_have_alone(attend, is_causal):
    """Documents of one token, of less than a block and of several blocks."""
    arrays = {name: x[:1] for name, x in draw(LENGTH, LENGTH).items()}

    @jax.jit
    def run(arrays, **packing):
        return attend(**arrays, block_size=SIZE, is_causal=is_causal, **packing)

    packed = run(arrays, segment_ids=PACKED)
    for document in np.unique(PACKED):
        at = PACKED[0] == document
        alone = run({name: x[:, at] for name, x in arrays.items()})
        np.testing.assert_allclose(packed[:, at], alone, rtol=1e-12, atol=1e-12)
