"""cosFormer: distances, documents, and a state that holds no position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import cosformer_attention


def draw(queries=9, keys=9):
    rng = np.random.default_rng(0)
    shapes = (2, queries, 4, 3), (2, keys, 2, 3), (2, keys, 2, 5)
    return tuple(rng.normal(size=shape).astype(jnp.result_type(float)) for shape in shapes)


def direct(query, key, value, *, max_length, distance, allowed):
    query, key = jax.nn.relu(query), jnp.repeat(jax.nn.relu(key), 2, -2)
    cosine = jnp.where(allowed, jnp.cos(jnp.pi / 2 * distance / max_length), 0)
    weights = jnp.einsum("btnh,bsnh,ts->bnts", query, key, cosine)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("bnts,bsnd->btnd", weights, jnp.repeat(value, 2, -2))


def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


def test_documents_count_from_their_start_on_both_sides():
    """The same documents start at other positions in queries than in keys."""
    query_ids, key_ids = np.asarray([3, 3, 0, 1, 1, 1]), np.asarray([1, 1, 1, 1, 3, 3, 3, 3])
    of_query = np.asarray([0, 1, 0, 0, 1, 2])
    of_key = np.asarray([0, 1, 2, 3, 0, 1, 2, 3])
    with jax.enable_x64(True):
        args = draw(6, 8)
        both = tuple(np.broadcast_to(ids, (2, len(ids))) for ids in (query_ids, key_ids))
        ours = compiled(cosformer_attention, max_length=8)(*args, segment_ids=both)
        expected = compiled(direct, max_length=8)(
            *args,
            distance=of_query[:, None] - of_key,
            allowed=(query_ids[:, None] == key_ids) & (query_ids != 0)[:, None],
        )
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


def test_positions_are_given_in_place_of_the_order():
    of_query, of_key = np.asarray([[4, 2], [0, 1]]), np.asarray([[0, 3, 1], [2, 2, 5]])
    with jax.enable_x64(True):
        args = draw(2, 3)
        ours = compiled(cosformer_attention, max_length=6)(*args, positions=(of_query, of_key))
        for row in range(2):
            distance = of_query[row][:, None] - of_key[row]
            expected = direct(
                *(x[row : row + 1] for x in args), max_length=6, distance=distance, allowed=True
            )
            np.testing.assert_allclose(ours[row], expected[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"positions must be integers of shape \(2, 2\)"):
        cosformer_attention(*args, max_length=6, positions=of_query)


def test_a_long_maximum_is_linear_attention():
    args = draw()
    for is_causal in (False, True):
        ours = compiled(cosformer_attention, max_length=10**6, is_causal=is_causal)
        linear = compiled(effattn.linear_attention, feature_map="relu", is_causal=is_causal)
        np.testing.assert_allclose(ours(*args), linear(*args), rtol=1e-5, atol=1e-6)


def test_a_state_continues_after_padding_and_in_pieces():
    """The state is taken after three tokens and two of padding, then continued in two pieces."""
    with jax.enable_x64(True):
        args = draw()
        run = compiled(cosformer_attention, max_length=9, is_causal=True, return_state=True)
        whole, after = map(np.asarray, run(*args))
        lengths = np.full(2, 3)
        _, state = run(*(x[:, :5] for x in args), key_value_seq_lengths=lengths)
        one, state = run(*(x[:, 3:4] for x in args), initial_state=state)
        rest, state = run(*(x[:, 4:] for x in args), initial_state=state)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
        close(np.concatenate([one, rest], 1), whole[:, 3:])
        close(state, after)


def test_a_state_of_given_positions_is_seen_from_the_next_one():
    """The later tokens stand 0, 2 and 5 positions after the position that follows the third key."""
    positions = np.asarray([[5, 6, 9, 10, 12, 15], [1, 2, 3, 4, 6, 9]])
    with jax.enable_x64(True):
        args = draw(6, 6)
        run = compiled(cosformer_attention, max_length=20, is_causal=True, return_state=True)
        whole, after = run(*args, positions=positions)
        _, state = run(*(x[:, :3] for x in args), positions=positions[:, :3])
        distances = np.asarray([[0, 2, 5]] * 2)
        rest, final = run(*(x[:, 3:] for x in args), positions=distances, initial_state=state)
        np.testing.assert_allclose(rest, whole[:, 3:], rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(final, after, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("max_length", "message"),
    [
        (8, "max_length must be at least 9, the number of tokens, got 8"),
        (0, "max_length must be an int, 1 or more tokens"),
        (9.5, "max_length must be an int, 1 or more tokens"),
    ],
)
def test_bad_lengths_are_named(max_length, message):
    with pytest.raises(ValueError, match=message):
        cosformer_attention(*draw(), max_length=max_length)
