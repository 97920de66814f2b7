"""Based with a window: exponentials near, their Taylor series far, one normaliser."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.functional.based import BasedState
from tests.marks import slow

WINDOW = 3
PACKED = np.array([[1] * 2 + [2] * 9 + [0] + [5] * 4, [3] * 14 + [0] * 2])


def draw(length, batch=(2,), seed=0):
    rng = np.random.default_rng(seed)
    shapes = (length, 4, 3), (length, 2, 3), (length, 2, 5)
    dtype = jnp.result_type(float)
    return tuple(rng.normal(size=(*batch, *shape)).astype(dtype) for shape in shapes)


def plainly(query, key, value, ids):
    """Definition over all pairs; `ids (*B, T)` are 0 in padding."""
    length = key.shape[-3]
    logits = jnp.einsum("...tnh,...snh->...nts", query, jnp.repeat(key, 2, -2)) * 3**-0.5
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    weights = jnp.where(back <= WINDOW, jnp.exp(logits), 1 + logits + logits**2 / 2)
    same = (ids[..., :, None] == ids[..., None, :]) & (ids != 0)[..., :, None]
    weights = jnp.where((back >= 0) & same[..., None, :, :], weights, 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("...nts,...snd->...tnd", weights, jnp.repeat(value, 2, -2))


attend = jax.jit(
    functools.partial(
        effattn.based_attention, local_window_size=WINDOW, is_causal=True, chunk_size=4
    ),
    static_argnames="return_state",
)


@pytest.mark.parametrize("ids", [PACKED, slow(None)], ids=["documents", "one document"])
def test_near_tokens_are_exact_and_far_ones_a_series(ids):
    """Documents of several lengths, with padding among them, and every gradient."""

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(function, arrays, ids):
        out, pull_back = jax.vjp(lambda *arrays: function(*arrays, ids), *arrays)
        return out, *pull_back(np.random.default_rng(1).normal(size=out.shape))

    def ours(query, key, value, ids):
        return attend(query, key, value, segment_ids=ids)

    with jax.enable_x64(True):
        arrays = draw(16)  # whole chunks, so that only one loop is compiled
        given = np.ones_like(PACKED) if ids is None else ids
        for a, b in zip(
            with_gradients(ours, arrays, ids), with_gradients(plainly, arrays, given), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_float32_stays_float32_where_float64_is_enabled():
    arrays = [x.astype(jnp.float32) for x in draw(17)]
    with jax.enable_x64(True):
        out, gradients = jax.eval_shape(jax.value_and_grad(lambda *a: attend(*a).sum()), *arrays)
    assert out.dtype == gradients.dtype == jnp.float32


def test_any_split_is_the_whole():
    """Rows of unequal lengths, in calls shorter and longer than the window."""
    with jax.enable_x64(True):
        arrays = draw(20)
        whole = attend(*arrays)
        outs, state, start = [[], []], None, np.zeros(2, int)
        for size, lengths in ((2, [1, 2]), (12, [2, 5]), (12, [7, 0]), (2, [1, 1]), (12, [9, 12])):
            part = [
                np.stack([np.resize(a[b, start[b] :], (size, *a.shape[2:])) for b in range(2)])
                for a in arrays
            ]
            padding = dict.fromkeys(
                ("query_seq_lengths", "key_value_seq_lengths"), np.array(lengths)
            )
            out, state = attend(*part, initial_state=state, return_state=True, **padding)
            out = np.asarray(out)
            for b in range(2):
                outs[b].append(out[b, : lengths[b]])
            start += lengths
        for b in range(2):
            np.testing.assert_allclose(np.concatenate(outs[b]), whole[b], rtol=1e-9, atol=1e-9)


def test_what_is_in_padding_reaches_nothing():
    query, key, value = draw(12)
    lengths = np.array([5, 12])
    inside = (np.arange(12) < lengths[:, None])[..., None, None]
    given = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}

    def loss(*arrays):
        out, state = attend(*arrays, return_state=True, **given)
        return (out**2).sum() + (state.sums**2).sum() + (state.key**2).sum()

    with_gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    clean = with_gradients(query, key, value)
    dirty = [np.where(inside, x, np.nan) for x in (query, key, value)]
    jax.tree.map(np.testing.assert_array_equal, with_gradients(*dirty), clean)


def test_the_future_changes_no_bit_of_the_past():
    arrays = draw(16)
    before = np.asarray(attend(*arrays))
    for t in (0, 4, 13):
        future = (np.arange(16) >= t)[:, None, None]
        after = np.asarray(attend(*(np.where(future, x + 1, x) for x in arrays)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])


def state(window=3, values=5, examples=2):
    return BasedState(
        sums=jnp.zeros((2, 2, 10, values + 1)),
        key=jnp.zeros((2, window, 2, 3)),
        value=jnp.zeros((2, window, 2, values)),
        length=jnp.zeros(examples, int),
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"is_causal": False}, "needs is_causal=True"),
        ({"local_window_size": (3, 1)}, r"w or \(w, 0\)"),
        ({"initial_state": jnp.zeros((2, 2, 10, 6))}, "BasedState"),
        ({"initial_state": state(window=2)}, r"initial_state.key must .*\(2, 3, 2, 3\)"),
        ({"initial_state": state(values=4)}, r"initial_state.value must .*\(2, 3, 2, 5\)"),
        ({"initial_state": state(examples=3)}, r"initial_state.length must .*shape \(2,\)"),
        ({"initial_state": state(), "local_window_size": None}, "array of .*, got BasedState"),
        ({"segment_ids": jnp.ones((2, 5), int), "return_state": True}, "one document a row"),
    ],
)
def test_bad_input_is_named(options, message):
    given = {"local_window_size": 3, "is_causal": True, **options}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: effattn.based_attention(*draw(5), **given))


def test_no_tokens_leave_the_state_as_it_was():
    x, none = (jnp.ones((length, 1, 2)) for length in (3, 0))
    run = functools.partial(
        effattn.based_attention, local_window_size=2, is_causal=True, return_state=True
    )

    @jax.jit
    def twice():
        _, before = run(x, x, x)
        y, after = run(none, none, none, initial_state=before)
        return y, before, after

    y, before, after = twice()
    assert y.shape == none.shape
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("return_state", [True, slow(False)])
def test_lengths_of_queries_and_keys_may_differ(return_state):
    """Queries after the last key reach keys that left the window; states hold the last keys."""
    lengths = {"query_seq_lengths": np.array([16, 5]), "key_value_seq_lengths": np.array([7, 11])}
    with jax.enable_x64(True):
        given = {"local_window_size": WINDOW, "is_causal": True, "return_state": return_state}
        arrays = draw(16)
        ours = jax.jit(functools.partial(effattn.based_attention, **given))(*arrays, **lengths)
        naive = jax.jit(functools.partial(effattn.naive.based, **given))(*arrays, **lengths)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
        jax.tree.map(close, ours, naive)


def test_one_length_serves_arrays_without_a_batch():
    query, key, value = (x[0] for x in draw(5))
    lengths = jnp.array([3])
    given = {"is_causal": True, "local_window_size": WINDOW, "key_value_seq_lengths": lengths}
    out = effattn.based_attention(query, key, value, **given)
    expected = effattn.based_attention(query[None], key[None], value[None], **given)
    np.testing.assert_array_equal(out, expected[0])
