"""Longformer attention against its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import sliding_window_attention
from effattn.functional.longformer import longformer_attention
from effattn.testing.functions import assert_close
from tests.dense import cotangents, dense_with_gradients, draw, with_gradients
from tests.marks import slow

LENGTH = 29


def draw_global(share=0.2):
    return np.random.default_rng(3).random((2, LENGTH)) < share


def local_pairs(dilation):
    ahead = np.arange(LENGTH) - np.arange(LENGTH)[:, None]
    return (abs(ahead) <= 3 * dilation) & (ahead % dilation == 0)


# Every pair of values of any two of these parameters occurs in a case.
@pytest.mark.parametrize(
    "is_causal, dilation, padding",
    [
        slow(False, 1, "lengths"),
        slow(False, 3, "segments"),
        slow(True, 1, "segments"),
        slow(True, 3, "lengths"),
    ],
)
def test_global_tokens_see_all_and_all_see_them(is_causal, dilation, padding, x64):
    arrays = draw(LENGTH, LENGTH)
    is_global = draw_global()
    lengths = np.array([LENGTH, 20])
    given = {
        "is_causal": is_causal,
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(1),
    }
    if padding == "lengths":
        given |= {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    else:
        given |= {"segment_ids": (np.arange(LENGTH) // 11 + (np.arange(LENGTH) < 27)) * [[1], [2]]}

    def function(arrays, known):
        return longformer_attention(
            **arrays,
            **given,
            local_window_size=3,
            dilation=dilation,
            global_mask=is_global,
            max_global=LENGTH // 2,
            tile=(8, 8),
            return_residual=True,
        )

    mask = local_pairs(dilation) | is_global[:, None, :] | is_global[:, :, None]
    expected = dense_with_gradients(arrays, **given, mask=mask[:, None])
    assert_close(with_gradients(function, arrays), expected, 1e-12)


def test_global_tokens_have_projections_of_their_own(x64):
    arrays, rng = draw(LENGTH, LENGTH), np.random.default_rng(5)
    of_global = {f"global_{name}": rng.normal(size=a.shape) for name, a in arrays.items()}
    is_global = draw_global()
    shown = {"local_window_size": 3, "global_mask": is_global, "max_global": 12}

    def function(arrays, known):
        return longformer_attention(**arrays, **shown, return_residual=True)

    (out, lse), gradients = with_gradients(function, arrays | of_global)
    d_out, d_lse = cotangents(arrays)
    local = local_pairs(1) | is_global[:, None, :]
    for prefix, rows, mask in (("", ~is_global, local), ("global_", is_global, np.True_)):
        theirs = {name: (arrays | of_global)[prefix + name] for name in arrays}
        rows = rows[..., None]
        expected, of_theirs = _dense(
            np.broadcast_to(mask, local.shape), theirs, (d_out * rows[..., None], d_lse * rows)
        )
        for ours, plain in zip((out, lse), expected, strict=True):
            which = rows.reshape(*rows.shape, *(1,) * (ours.ndim - rows.ndim))
            assert_close(np.asarray(ours) * which, np.asarray(plain) * which, 1e-12)
        found = {name: gradients[prefix + name] for name in arrays}
        assert_close(found, of_theirs, 1e-12)


@jax.jit
def _dense(mask, arrays, cotangents):
    """`((out, lse), gradients)` over the pairs of a mask `(B, T, S)`."""

    def attend(arrays):
        key, value = (jnp.repeat(arrays[name], 2, -2) for name in ("key", "value"))
        logits = jnp.einsum("btnh,bsnh->btns", arrays["query"], key) * key.shape[-1] ** -0.5
        logits = jnp.where(mask[:, :, None], logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, -1)
        return jnp.einsum("btns,bsnh->btnh", jnp.exp(logits - lse[..., None]), value), lse

    results, pull_back = jax.vjp(attend, arrays)
    return results, pull_back(cotangents)[0]


def test_more_global_tokens_than_there_is_room_for():
    arrays = draw(LENGTH, LENGTH, dtype=np.float32)
    is_global = draw_global()
    first = is_global & (np.cumsum(is_global, -1) <= 2)
    run = jax.jit(functools.partial(longformer_attention, local_window_size=3, max_global=2))
    np.testing.assert_array_equal(
        run(**arrays, global_mask=is_global), run(**arrays, global_mask=first)
    )


def test_without_global_tokens_it_is_a_sliding_window():
    arrays = draw(LENGTH, LENGTH, dtype=np.float32)

    def run(function, **options):
        return jax.jit(functools.partial(function, local_window_size=3, **options))(**arrays)

    np.testing.assert_array_equal(
        run(longformer_attention, dilation=2), run(sliding_window_attention, dilation=2)
    )
    none = run(longformer_attention, global_mask=np.zeros((1, LENGTH), bool), max_global=4)
    assert_close(none, run(sliding_window_attention), 1e-6)


MASK = np.zeros((2, LENGTH), bool)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"max_global": 2}, "max_global=2 needs global_mask"),
        ({"global_mask": MASK}, f"max_global must be an int from 1 to the length {LENGTH}"),
        ({"global_mask": MASK, "max_global": 30}, "got 30"),
        ({"global_mask": MASK * 1.0, "max_global": 2}, "global_mask must be bool, got dtype float"),
        ({"global_mask": MASK[:, 1:], "max_global": 2}, "global_mask must"),
        ({"dilation": 0}, "dilation must be an int, 1 or more tokens, got 0"),
        ({"global_key": np.ones((2, 3))}, "global_key"),
        (
            {"global_value": np.ones((2, LENGTH, 2, 5), np.float16)},
            "global_value must have the dtype of value, float32, got float16",
        ),
    ],
)
def test_wrong_arguments_are_named(given, message):
    arrays = draw(LENGTH, LENGTH, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        longformer_attention(**arrays, local_window_size=3, **given)


def test_query_and_key_have_one_length():
    with pytest.raises(ValueError, match="need the same length, got 11 and 14"):
        longformer_attention(**draw(dtype=np.float32), local_window_size=3)
