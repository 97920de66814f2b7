"""The recurrence of a cell in XLA: a scan over the tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.axes import lead
from effattn.interfaces.cell_recurrence import OUTPUT, STATES, Config


def cell_recurrence(
    config: Config,
    tokens: jax.Array,
    recurrent: jax.Array,
    bias: jax.Array,
    carry: jax.Array,
    starts: jax.Array | None,
    valid: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The outputs and the carry after the last token, as `effattn.cores.cell_recurrence`."""
    batch, output = carry.ndim - 3, OUTPUT[config.cell]
    # Gradients of what all tokens share are summed over the scan, in the dtype that it has here.
    recurrent, bias = recurrent.astype(carry.dtype), bias.astype(carry.dtype)

    def one_token(before, inputs):
        token, start, is_valid = inputs
        before = restarted(before, start)
        of_state = parts_of_state(before[output], recurrent, bias, config.dtype)
        preactivations = join(config.cell, token.astype(carry.dtype), of_state)
        after = chosen(is_valid, advance(config.cell, preactivations, before), before)
        return after, after[output]

    by_time = [None if x is None else jnp.moveaxis(x, batch, 0) for x in (tokens, starts, valid)]
    first = separate(config.cell, carry)
    last, out = lax.scan(one_token, first, tuple(by_time), reverse=config.is_reversed)
    return jnp.moveaxis(out, 0, batch), jnp.stack(last, batch)


def separate(cell: str, carry: jax.Array) -> list[jax.Array]:
    """The arrays of a carry `(..., S, N, H)`."""
    return [carry[..., number, :, :] for number in range(STATES[cell])]


def restarted(carry: Sequence[jax.Array], start: jax.Array | None) -> list[jax.Array]:
    """The carry, zero where a token starts anew."""
    if start is None:
        return list(carry)
    return [jnp.where(start[..., None, None], 0, each) for each in carry]


def chosen(
    is_first: jax.Array | None, first: Sequence[jax.Array], second: Sequence[jax.Array]
) -> list[jax.Array]:
    """The first carry where a condition holds, or everywhere for None; elsewhere the second."""
    if is_first is None:
        return list(first)
    pairs = zip(first, second, strict=True)
    return [jnp.where(is_first[..., None, None], *pair) for pair in pairs]


def parts_of_state(h: jax.Array, recurrent: jax.Array, bias: jax.Array, dtype: Any) -> jax.Array:
    """h R + b, `(..., G, N, H)`, for h `(..., N, H)`; the product is computed in `dtype`."""
    heads, size, gates, _ = recurrent.shape
    R, given = recurrent.astype(dtype).reshape(heads, size, gates * size), h.astype(dtype)
    if heads == 1:  # with an axis of heads, XLA would not call its fast product
        product = (given[..., 0, :] @ R[0])[..., None, :]
    else:
        product = jnp.einsum("...nh,nhk->...nk", given, R)
    by_gate = jnp.swapaxes(product.reshape(*h.shape[:-1], gates, size), -3, -2)
    return by_gate.astype(h.dtype) + lead(bias.astype(h.dtype), by_gate.ndim)


def join(cell: str, of_token: jax.Array, of_state: jax.Array) -> jax.Array:
    """The four pre-activations of a cell, `(..., 4, N, H)`, from the two parts `(..., G, N, H)`.

    They are the sums; those of a GRU are r, z and both parts of n.
    """
    if cell != "gru":
        return of_token + of_state
    both = of_token[..., :2, :, :] + of_state[..., :2, :, :]
    return jnp.concatenate([both, of_token[..., 2:, :, :], of_state[..., 2:, :, :]], -3)


def advance(cell: str, preactivations: jax.Array, before: Sequence[jax.Array]) -> list[jax.Array]:
    """The carry after a token, from pre-activations `(..., 4, N, H)` and the carry before it."""
    a, b, c, d = (preactivations[..., number, :, :] for number in range(4))
    if cell == "gru":
        return _gru(a, b, c, d, *before)
    if cell == "lstm":
        return _lstm(a, b, c, d, *before)
    log_forget = jax.nn.log_sigmoid(c) if cell == "slstm" else c
    return _slstm(a, b, log_forget, d, *before)


def _lstm(i, f, g, o, c, _):
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return [c, jax.nn.sigmoid(o) * jnp.tanh(c)]


def _gru(r, z, n_of_token, n_of_state, h):
    z, n = jax.nn.sigmoid(z), jnp.tanh(n_of_token + jax.nn.sigmoid(r) * n_of_state)
    return [(1 - z) * n + z * h]


def _slstm(z, log_write, log_forget, o, c, n, _, m):
    # Before the first token there is nothing to keep, whatever the gate.
    kept = log_forget + lax.stop_gradient(m)
    m = lax.stop_gradient(jnp.maximum(jnp.where(n > 0, kept, log_write), log_write))
    written = jnp.exp(log_write - m)
    kept = jnp.where(n > 0, jnp.exp(jnp.where(n > 0, kept - m, 0)), 0)
    c, n = kept * c + written * jnp.tanh(z), kept * n + written
    return [c, n, jax.nn.sigmoid(o) * c / n, m]
