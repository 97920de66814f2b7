"""The chunked recurrence against the recurrence one token at a time, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.functional.feature_maps import elu, identity
from effattn.xla.linear_recurrence import (
    Documents,
    Rule,
    Tokens,
    linear_recurrence,
    linear_sum,
    normalize,
)


def token_by_token(query, key, value, state, documents=None, *, normalized):
    """S_t = S_(t-1) + k_t v_t^T, started anew where a document starts; y_t = S_t^T q_t."""
    groups = query.shape[-2] // key.shape[-2]
    query, key, value = (jnp.moveaxis(x, -3, 0) for x in (query, key, value))
    if normalized:
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)
    keep = jnp.ones(key.shape[:-2])
    reads = jnp.ones(key.shape[:-2])
    if documents is not None:
        keep = jnp.moveaxis(documents.key == documents.previous, -1, 0).astype(keep.dtype)
        reads = jnp.moveaxis(documents.query == documents.key, -1, 0).astype(reads.dtype)

    def step(state, token):
        q, k, v, kept, read = token
        state = state * kept[..., None, None, None] + k[..., :, None] * v[..., None, :]
        output = jnp.einsum("...nf,...nfd->...nd", q, jnp.repeat(state, groups, -3))
        return state, output * read[..., None, None]

    state, output = jax.lax.scan(step, state, (query, key, value, keep, reads))
    if normalized:
        empty = output[..., -1:] == 0
        output = jnp.where(empty, 0, output[..., :-1]) / jnp.where(empty, 1, output[..., -1:])
    return jnp.moveaxis(output, 0, -3), state


def arguments(
    length, batch=(2,), heads=4, key_heads=2, size=3, value_size=5, *, normalized, seed=0
):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.uniform(0.1, 1, (*batch, *shape)))

    return (
        draw(length, heads, size),
        draw(length, key_heads, size),
        draw(length, key_heads, value_size) - 0.5,
        draw(key_heads, size, value_size + normalized),
    )


def packed(*rows):
    return Documents.of(jnp.asarray(rows, jnp.int32))


def assert_same(function, reference, args, rtol=1e-12):
    """Values, and the gradients of every argument for random cotangents of every result."""
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), jax.eval_shape(reference, *args)
    )

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(function):
        results, pull_back = jax.vjp(function, *args)
        return jax.tree.leaves((results, pull_back(cotangents)))

    for a, b in zip(with_gradients(function), with_gradients(reference), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max(initial=1)))


def rule(normalized=True, chunk=64, feature_map=identity):
    return Rule(normalized, feature_map, None, chunk)


def recurrence(query, key, value, state, documents=None, *, rule):
    return linear_recurrence(rule, query, key, value, state, None, Tokens(documents=documents))


# With chunks of 2: a token alone; two blocks, two chunks and a token.
@pytest.mark.parametrize(
    "length, batch, normalized", [(1, (), True), (37, (2,), True), (37, (2, 3), False)]
)
def test_agrees_with_one_token_at_a_time(length, batch, normalized):
    with jax.enable_x64(True):
        assert_same(
            functools.partial(recurrence, rule=rule(normalized, 2)),
            functools.partial(token_by_token, normalized=normalized),
            arguments(length, batch, normalized=normalized),
        )


def test_packed_documents_start_anew():
    documents = packed([1] * 3 + [2] * 20 + [5] * 10, [0] * 2 + [7] * 14 + [3] + [4] * 9 + [0] * 7)
    with jax.enable_x64(True):
        assert_same(
            functools.partial(recurrence, documents=documents, rule=rule(chunk=2)),
            functools.partial(token_by_token, documents=documents, normalized=True),
            arguments(33, normalized=True),
        )


def test_feature_map_scale_and_masks():
    mask = jnp.asarray([[True] * 9, [False, True, True, False, False, True, True, True, False]])

    def ours(query, key, value, state, scale):
        tokens = Tokens(mask[::-1], mask)
        return linear_recurrence(rule(False, 2, elu), query, key, value, state, scale, tokens)

    def expected(query, key, value, state, scale):
        query = jnp.where(mask[::-1, :, None, None], scale * elu(query), 0)
        key = jnp.where(mask[..., None, None], elu(key), 0)
        return token_by_token(query, key, value, state, normalized=False)

    with jax.enable_x64(True):
        args = (*arguments(9, normalized=False), jnp.asarray(0.7))
        assert_same(ours, expected, args)


def test_length_zero_gives_the_state_back():
    args = arguments(0, normalized=True)
    output, after = recurrence(*args, rule=rule())
    assert output.shape == (2, 0, 4, 5)
    np.testing.assert_array_equal(after, args[-1])


def test_documents_of_padding():
    ids = jnp.asarray([[0, 1, 1, 0, 2, 0, 0], [0, 0, 0, 0, 0, 0, 0], [3, 3, 4, 4, 5, 5, 5]])
    valid = jnp.arange(7) < jnp.asarray([[7], [7], [3]])
    documents = Documents.of(ids, valid)
    np.testing.assert_array_equal(
        documents.key, [[1, 1, 1, 1, 2, 2, 2], [0] * 7, [3, 3, 4, 4, 4, 4, 4]]
    )
    np.testing.assert_array_equal(documents.previous[:, 1:], documents.key[:, :-1])
    np.testing.assert_array_equal(documents.previous[:, 0], documents.key[:, 0])


def test_sum_is_the_recurrence_read_at_its_end():
    def ours(query, key, value, state):
        return linear_sum(rule(), query, key, value, state, None, Tokens())

    def expected(query, key, value, state):
        _, state = recurrence(query, key, value, state, rule=rule())
        nothing = jnp.zeros_like
        output, _ = recurrence(query, nothing(key), nothing(value), state, rule=rule())
        return output, state

    with jax.enable_x64(True):
        query, key, value, state = arguments(7, normalized=True)
        # A key of zeros adds nothing: the second call reads the sum over the first.
        assert_same(ours, expected, (query, key, value, state))


def test_normalize_divides_by_the_last_entry_once():
    x = jnp.asarray([[6.0, 2.0], [3.0, 0.0], [1e-30, 1e-25], [2.0, 1e-45]])
    np.testing.assert_allclose(normalize(x), [[3], [0], [1e-5], [0]], rtol=1e-6)
    gradient = jax.grad(lambda x: normalize(x).sum())(x)
    np.testing.assert_allclose(gradient, [[0.5, -1.5], [0, 0], [1e25, -1e20], [0, 0]], rtol=1e-6)


def test_the_future_changes_no_bit_of_the_past():
    *inputs, state = map(np.asarray, arguments(37, normalized=True))
    run = jax.jit(functools.partial(recurrence, rule=rule(chunk=4)))
    before, _ = run(*inputs, state)
    for t in (0, 3, 4, 31, 32, 36):
        future = np.arange(37)[:, None, None] >= t
        after, _ = run(*(np.where(future, -3 * x, x) for x in inputs), state)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert not np.array_equal(after[:, t], before[:, t])


def test_memory_is_linear_and_the_program_does_not_grow():
    def run(*args):
        output, state = recurrence(*args, rule=rule())
        return (output**2).sum() + (state**2).sum()

    def compiled(length):
        args = arguments(length, (), 2, 2, 16, 16, normalized=True)
        return jax.jit(jax.grad(run, argnums=(0, 1, 2, 3))).lower(*args).compile()

    short, long = compiled(4096), compiled(16384)
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (short, long)]
    assert np.log(sizes[1] / sizes[0]) / np.log(4) <= 1.1
    assert len(long.as_text()) < 1.02 * len(short.as_text())


def test_forward_mode_says_what_to_use():
    args = arguments(5, normalized=True)
    with pytest.raises(TypeError, match=r"reverse mode only .*use jax\.grad"):
        jax.jvp(functools.partial(recurrence, rule=rule()), args, args)
