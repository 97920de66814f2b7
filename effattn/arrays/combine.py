"""Combination of softmax attention outputs over key sets, by their log-sum-exps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.gathers import largest_of, pick, spread
from effattn.arrays.linear_map import with_derivatives


def exponentials(
    logits: jax.Array, allowed: jax.Array, axes: int | tuple[int, ...] = -1
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax weights before the division, for rows that may be empty.

    Returns:
      exp(logit - largest) of the allowed pairs, and 0 elsewhere; their sum over `axes`, which keeps
      these axes and is 1 for empty rows; the log-sum-exp without these axes, `dtypes.lowest` for
      empty rows.
    """
    lowest = dtypes.lowest(logits.dtype)
    logits = jnp.where(allowed, logits, lowest)
    largest = lax.stop_gradient(logits.max(axes, keepdims=True, initial=lowest))
    weights = jnp.where(allowed, jnp.exp(logits - largest), 0)
    total = weights.sum(axes, keepdims=True)
    is_empty, total = total == 0, jnp.where(total == 0, 1, total)
    lse = jnp.where(is_empty, lowest, largest + jnp.log(total))
    return weights, total, lse.squeeze(axes)


def combine(outputs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    r"""Attention over a union of disjoint key sets, from the attention over each.

        lse = log sum_p exp(lse_p),    out = sum_p exp(lse_p - lse) out_p

    Args:
      outputs: one `(*B, T, N, Hv)` for each part.
      lses: their log-sum-exps `(*B, T, N)`; -inf where a part is empty for a row.

    Returns:
      The output in the dtype of the first part, and the log-sum-exp over all keys, as one call over
      all keys returns them with `return_residual`. Zeros and -inf where all parts are empty.

    Raises:
      ValueError: numbers or shapes of `outputs` and `lses` do not match.
    """
    if len(outputs) != len(lses) or len(outputs) == 0:
        raise ValueError(
            "combine needs as many lses as outputs and at least one, got "
            f"{len(outputs)} outputs and {len(lses)} lses"
        )
    outputs = [checks.as_array("outputs", out) for out in outputs]
    lses = [checks.as_array("lses", lse) for lse in lses]
    for out, lse in zip(outputs, lses, strict=True):
        if out.shape != outputs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                "combine needs outputs of one shape (*B, T, N, Hv) and lses (*B, T, N), got "
                f"{[o.shape for o in outputs]} and {[one.shape for one in lses]}"
            )
    empty = [(lse == -jnp.inf) | (lse == dtypes.lowest(lse.dtype)) for lse in lses]
    nothing = functools.reduce(jnp.logical_and, empty)
    # Empty parts get the lowest finite number, so that the maximum is finite.
    finite = [
        jnp.where(is_empty, jnp.finfo(lse.dtype).min, lse)
        for lse, is_empty in zip(lses, empty, strict=True)
    ]
    largest = lax.stop_gradient(functools.reduce(jnp.maximum, finite))
    shift = jnp.where(nothing, 0, largest)
    weights = [
        jnp.exp(lse - shift) * (~is_empty).astype(lse.dtype)
        for lse, is_empty in zip(finite, empty, strict=True)
    ]
    total = jnp.where(nothing, 1, functools.reduce(jnp.add, weights))
    parts = zip(weights, outputs, strict=True)
    mixed = functools.reduce(jnp.add, (dtypes.product(w[..., None], out) for w, out in parts))
    out = (mixed / total[..., None]).astype(outputs[0].dtype)
    # Rows without keys keep the value that the parts use for them: -inf or `dtypes.lowest`.
    of_nothing = lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    return out, jnp.where(nothing, of_nothing, shift + jnp.log(total))


def combine_at(
    out: jax.Array, lse: jax.Array, at: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """Like `combine`, for parts that have outputs for some tokens only, such as clusters.

    Args:
      out: `(*B, N, C, M, Hv)`, the outputs of C parts for M tokens each.
      lse: `(*B, N, C, M)`, `dtypes.lowest` for entries that do not count.
      at: int `(*B, N, C, M)`, the token of each entry; a part has each token at most once.
      length: number of tokens T.

    Returns:
      The output `(*B, N, T, Hv)` and the log-sum-exp `(*B, N, T)`; zeros and `dtypes.lowest` for
      tokens in no part.
    """
    lowest = dtypes.lowest(lse.dtype)
    largest = largest_of(lax.stop_gradient(lse), at, length)
    largest = jnp.where(largest == lowest, 0, largest)
    weights = jnp.where(lse == lowest, 0, jnp.exp(lse - pick(largest, at)))
    total = spread(weights, at, length)
    mixed = spread(dtypes.product(weights[..., None], out), at, length)
    total_or_one = jnp.where(total == 0, 1, total)
    out = (mixed / total_or_one[..., None]).astype(out.dtype)
    return out, jnp.where(total == 0, lowest, largest + jnp.log(total_or_one))


def combine_one_by_one(
    attend: Callable[..., tuple[jax.Array, jax.Array]], learnt: Any, fixed: Any, parts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`combine` of parts that are computed one after the other, with one part in memory at a time.

    Args:
      attend: `(learnt, fixed, part)` to the output `(*B, T, N, Hv)` and log-sum-exp `(*B, T, N)` of
        a part, both of at least float32.
      learnt: pytree of arrays with gradients.
      fixed: pytree of arrays without gradients.
      parts: the parts, one for each entry of the first axis; without gradients.
    """
    return _combined(attend, learnt, fixed, parts)


def _one_by_one(attend, learnt, fixed, parts):
    def step(so_far, part):
        return combine(*zip(so_far, attend(learnt, fixed, part), strict=True)), None

    return lax.scan(step, attend(learnt, fixed, parts[0]), parts[1:])[0]


def _one_by_one_fwd(attend, learnt, fixed, parts):
    out, lse = _one_by_one(attend, learnt, fixed, parts)
    return (out, lse), (learnt, fixed, parts, out, lse)


def _one_by_one_bwd(attend, residuals, cotangents):
    learnt, fixed, parts, out, lse = residuals
    d_out, d_lse = cotangents
    delta = (d_out * out).sum(-1) - d_lse  # with the gradient of the log-sum-exp

    def step(total, part):
        (own, own_lse), pull = jax.vjp(lambda x: attend(x, fixed, part), learnt)
        weight = jnp.where(own_lse == dtypes.lowest(lse.dtype), 0, jnp.exp(own_lse - lse))
        d_own = weight[..., None] * d_out, weight * ((d_out * own).sum(-1) - delta)
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, pull(d_own)[0]), None

    def nothing(x):
        return mesh_axes.vary_like(x, jnp.zeros(x.shape, dtypes.common(x.dtype, lse.dtype)))

    total, _ = lax.scan(step, jax.tree.map(nothing, learnt), parts)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), total, learnt), None, None


# JAX's derivative of the scan in reverse mode would keep the results of all parts.
_combined = with_derivatives(_one_by_one, _one_by_one_fwd, _one_by_one_bwd)
