"""Approximation error against exact softmax attention, and effective rank of attention."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from effattn.analysis.probes import mixed, mixing_weights
from effattn.arrays import checks
from effattn.functional.softmax import dot_product_attention
from effattn.nn.binding import Binding, resolve

# Each iteration after the first reduces the error by the squared ratio of an omitted to a kept
# singular value.
_ITERATIONS = 3


class ApproximationError(NamedTuple):
    """Relative errors against exact attention, `(*B, N)` each.

    Attributes:
      matrix: error of the attention matrix, ||A' - A||_F / ||A||_F.
      output: error of the output, ||A' V - A V||_F / ||A V||_F.
    """

    matrix: jax.Array
    output: jax.Array


def approximation_error(
    mechanism: str | Callable[..., Any],
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    is_causal: bool = False,
    keys_at_once: int = 128,
    **options: Any,
) -> ApproximationError:
    r"""Returns the error of a mechanism against exact softmax attention, for given inputs.

        A = softmax(H^-1/2 Q K^T),    A' = the matrix with which the mechanism mixes values

    No T x S array is formed. Blocks of columns of A' are the outputs for one-hot values of
    `keys_at_once` keys; the same columns of A come from the log-sum-exp of the rows. Memory
    O((T + S) (H + keys_at_once)); time O(T S H) plus S / keys_at_once calls of the mechanism.

    Args:
      mechanism: a registered name, or a function of query, key and value, such as those of
        `effattn`, or a `functools.partial` of one. The mechanism must be linear in the values and
        treat all value features alike.
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      is_causal: compare with causal attention; also passed to a mechanism that takes it.
      keys_at_once: tuning only.
      **options: other arguments of the mechanism's function; the registry has the defaults.

    Returns:
      `ApproximationError`, relative errors for each head, at least float32. A mechanism that
      returns zeros has error 1; there is no upper bound.

    Raises:
      ValueError: an unknown mechanism, or a mechanism without the direction of `is_causal`; wrong
        shapes; a function that does not return one array. Errors of the function pass through.
    """
    function, binding, options = resolve(mechanism, options)
    keys_at_once = checks.at_least("keys_at_once", keys_at_once, 1, "keys")
    options = _directed(binding, is_causal, options)
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)

    def run(query, key, value):
        return _errors(function, options, is_causal, keys_at_once, query, key, value)

    return jax.jit(run)(query, key, value)


def singular_values(
    mechanism: str | Callable[..., Any],
    query: ArrayLike,
    key: ArrayLike,
    *,
    count: int | None = None,
    rng: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Returns the singular values of the mixing matrix of each head, largest first.

    Without `count`, returns all singular values, from a decomposition of `mixing_weights`: time
    O(T S min(T, S)), for up to `LONGEST` tokens.

    With `count`, estimates the `count` largest singular values for any length, by subspace
    iteration (Halko et al. 2011, "Finding Structure with Randomness"): the mechanism is applied to
    `count` random values, and its transpose (the gradient with respect to the values) to the
    output, three times. Memory O((T + S) count), time O((T + S) count^2) plus six calls. Estimates
    never exceed the true values. They are accurate if the omitted singular values are much smaller
    than the kept values; for a flat spectrum, such as that of a window, they are not.

    Args:
      mechanism: as in `approximation_error`.
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      count: number of singular values, at most T and S; None for all.
      rng: a `jax.random` key, required with `count`.
      **options: other arguments of the mechanism's function, such as `is_causal=True`.

    Returns:
      `(*B, N, count or min(T, S))`, at least float32.

    Raises:
      ValueError: as `mixing_weights`; a `count` out of range, or without `rng`.
    """
    query, key = jnp.asarray(query), jnp.asarray(key)
    if count is None:
        if rng is not None:
            raise ValueError(
                "rng needs count, the number of singular values to estimate, got None; give both "
                "or neither"
            )
        weights = mixing_weights(mechanism, query, key, **options)
        return jnp.linalg.svd(weights, compute_uv=False)
    function, _, options = resolve(mechanism, options)
    fewest = min(query.shape[-3], key.shape[-3])
    if not checks.is_integer(count) or not 1 <= count <= fewest:
        raise ValueError(
            f"count must be an int from 1 to {fewest}, the number of tokens, got {count!r}"
        )
    if rng is None:
        raise ValueError(f"count={count} needs rng, a jax.random key, got None")
    return jax.jit(lambda q, k: _largest(function, options, count, rng, q, k))(query, key)


def effective_rank(singular: ArrayLike) -> jax.Array:
    """Returns the effective rank of matrices, from their singular values.

        exp(-sum_i p_i log p_i),    p_i = sigma_i / sum_j sigma_j

    The effective rank lies between 1 and the rank, and equals the rank if all nonzero sigma are
    equal (Roy and Vetterli 2007, "The Effective Rank: A Measure of Effective Dimensionality").
    Example: `effective_rank(singular_values("softmax", query, key))`.

    If `singular` has only the largest singular values, as for long sequences, the result is a lower
    bound. The bound is tight if the given singular values have nearly all of the sum.

    Args:
      singular: `(*, R)`, not negative.

    Returns:
      `(*)`, at least float32; 0 for a zero matrix.

    Raises:
      ValueError: no singular values.
    """
    singular = jnp.asarray(singular)
    if singular.ndim < 1 or singular.shape[-1] < 1:
        raise ValueError(f"singular must have shape (..., n) with n >= 1, got {singular.shape}")
    singular = singular.astype(jnp.promote_types(singular.dtype, jnp.float32))
    total = singular.sum(-1, keepdims=True)
    share = singular / jnp.where(total > 0, total, 1)
    entropy = jax.scipy.special.entr(share).sum(-1)
    return jnp.where(total[..., 0] > 0, jnp.exp(entropy), 0)


def _directed(binding: Binding, is_causal: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options, with `is_causal` if the function takes it."""
    binding.require("causal" if is_causal else "bidirectional", f"is_causal={is_causal}")
    given = {"is_causal": True} if is_causal and binding.takes("is_causal") else {}
    return {**options, **given}


def _errors(function, options, is_causal, keys_at_once, query, key, value) -> ApproximationError:
    exact, lse = dot_product_attention(
        query, key, value, is_causal=is_causal, precision="highest", return_residual=True
    )
    dtype = lse.dtype
    output = mixed(function, query, key, value, options)
    tokens, keys = query.shape[-3], key.shape[-3]
    block = min(keys_at_once, keys)
    padding = [(0, 0)] * key.ndim
    padding[-3] = (0, -keys % block)
    padded = jnp.pad(jnp.repeat(key, query.shape[-2] // key.shape[-2], -2), padding)
    scaled = query.astype(dtype) * query.shape[-1] ** -0.5

    def weights(start):
        """Returns the columns of A from `start` on, `(*B, T, N, C)`."""
        columns = jax.lax.dynamic_slice_in_dim(padded, start, block, -3).astype(dtype)
        logits = jnp.einsum("...tnh,...cnh->...tnc", scaled, columns, precision="highest")
        j = start + jnp.arange(block)
        seen = jnp.broadcast_to(j < keys, (tokens, block))
        if is_causal:
            seen &= j <= jnp.arange(tokens)[:, None]
        return jnp.where(seen[:, None, :], jnp.exp(logits - lse[..., None]), 0)

    def add(sums, start):
        one_hot = (jnp.arange(keys)[:, None] == start + jnp.arange(block)).astype(dtype)
        one_hot = jnp.broadcast_to(one_hot[:, None, :], (*key.shape[:-1], block))
        columns = weights(start)
        approximate = mixed(function, query, key, one_hot, options).astype(dtype)
        return tuple(
            total + (array**2).sum((-3, -1))
            for total, array in zip(sums, (approximate - columns, columns), strict=True)
        ), None

    zeros = jnp.zeros((*query.shape[:-3], query.shape[-2]), dtype)
    (wrong, whole), _ = jax.lax.scan(add, (zeros, zeros), jnp.arange(0, keys, block))
    exact, output = exact.astype(dtype), output.astype(dtype)
    apart, size = (jnp.sqrt((x**2).sum((-3, -1))) for x in (output - exact, exact))
    return ApproximationError(jnp.sqrt(wrong / whole), apart / size)


def _largest(function, options, count, rng, query, key) -> jax.Array:
    """Returns the largest singular values by subspace iteration, `(*B, N, count)`."""
    key = jnp.repeat(key, query.shape[-2] // key.shape[-2], -2)
    dtype = jnp.promote_types(jnp.result_type(query, key), jnp.float32)

    def basis(array):
        return jnp.swapaxes(jnp.linalg.qr(jnp.swapaxes(array, -3, -2))[0], -3, -2)

    def back_and_forth(_, value):
        out, transpose = jax.vjp(lambda v: mixed(function, query, key, v, options), basis(value))
        return transpose(basis(out))[0]

    value = jax.random.normal(rng, (*key.shape[:-1], count), dtype)
    value = jax.lax.fori_loop(0, _ITERATIONS, back_and_forth, value)
    return jnp.linalg.svd(jnp.swapaxes(value, -3, -2), compute_uv=False)
