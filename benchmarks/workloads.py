"""Workloads: plain float64 form, for the check of all contenders, and least cost."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HEADS, HEAD_SIZE = 4, 64
WINDOW = (255, 0)
_RETENTION = np.log1p(-(2.0 ** (-5.0 - np.arange(HEADS))))[:, None, None]
SPARSE_WINDOW, SPARSE_GLOBAL = 256, 16
PASSES = ("forward", "forward + backward")

# Matrix products over all pairs. Forward: logits and output. Backward, which recomputes the logits:
# the gradients of weights, queries, keys and values.
PRODUCTS = {"forward": 2, "forward + backward": 7}

Arrays = Sequence[Any]  # NumPy or JAX arrays


class Workload(NamedTuple):
    """Kind of attention.

    Attributes:
      weights: (query `(N, R, H)`, key `(N, S, H)`, positions `(R, 1)`) -> normalised `(N, R, S)`.
      pairs: length -> query-key pairs of a head; for a recurrence, pairs of a token and a feature.
        A pair costs a product of two vectors of length H.
      exponentials: length -> exponentials of a head in the forward pass.
    """

    weights: Callable[..., jax.Array]
    pairs: Callable[[int], int]
    exponentials: Callable[[int], int]

    def flops(self, length: int, which: str) -> int:
        return PRODUCTS[which] * 2 * HEADS * self.pairs(length) * HEAD_SIZE

    def exps(self, length: int, which: str) -> int:
        """Returns the number of exponentials; the backward pass recomputes those of the forward."""
        return HEADS * self.exponentials(length) * (1 if which == "forward" else 2)


def softmax_weights(query: jax.Array, key: jax.Array, allowed: Any) -> jax.Array:
    """Returns softmax weights `(N, R, S)` over the allowed pairs `(R, S)`."""
    logits = jnp.einsum("nrh,nsh->nrs", query, key) * query.shape[-1] ** -0.5
    return jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf), axis=-1)


def _softmax(query, key, position, left, right, first=0):
    at = jnp.arange(key.shape[1])
    allowed = (at - position >= -left) & (at - position <= right) | (at < first)
    return softmax_weights(query, key, allowed)


def linear_weights(query: jax.Array, key: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the normalised weights of causal linear attention with the feature map elu + 1."""
    similarity = jnp.einsum("nrh,nsh->nrs", jax.nn.elu(query) + 1, jax.nn.elu(key) + 1)
    similarity = jnp.where(jnp.arange(key.shape[1]) <= position, similarity, 0)
    return similarity / similarity.sum(-1, keepdims=True)


def scalar_gate(key: jax.Array) -> jax.Array:
    """Returns log decays by token `(...,)`, from keys `(..., H)` in place of a learned gate."""
    return jax.nn.log_sigmoid(key[..., 0] + 3)


def vector_gate(key: jax.Array) -> jax.Array:
    """Returns log decays by feature, `(..., H)`."""
    return jax.nn.log_sigmoid(key + 3)


def write_strength(key: jax.Array) -> jax.Array:
    """Returns the beta of the delta rule, `(...,)`."""
    return jax.nn.sigmoid(key[..., 1])


def unit(key: jax.Array) -> jax.Array:
    """Returns keys of length 1."""
    return key / jnp.linalg.norm(key, axis=-1, keepdims=True)


def recurrent_weights(
    query: jax.Array,
    key: jax.Array,
    position: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array | None = None,
) -> jax.Array:
    """Returns the weights of a recurrence, by a scan backward from the last key.

    The scan carries the queries backward in time: each token scales them by its decay and, in the
    delta rule, removes the part along its key. Log decays broadcast to the keys `(N, S, H)`; the
    strength `(N, S)` is the beta of the delta rule.
    """
    query = query * query.shape[-1] ** -0.5
    decays = jnp.broadcast_to(jnp.exp(log_decay), key.shape)
    betas = jnp.ones(key.shape[:2]) if strength is None else strength

    def step(reading, token):
        at, k, decay, beta = token
        reading = jnp.where(position == at, query, reading)
        weight = beta[:, None] * jnp.einsum("nrh,nh->nr", reading, k)
        passed = reading if strength is None else reading - weight[..., None] * k[:, None]
        return decay[:, None] * passed, weight

    by_token = [jnp.moveaxis(x, 1, 0) for x in (key, decays, betas)]
    tokens = (jnp.arange(key.shape[1]), *by_token)
    _, found = jax.lax.scan(step, jnp.zeros_like(query), tokens, reverse=True)
    return jnp.moveaxis(found, 0, -1)


def _recurrent(log_decay: Callable[[jax.Array], jax.Array], delta: bool):
    """Returns the weights of a recurrence whose gates, and unit keys, are computed from keys."""

    def weights(query, key, position):
        direction, strength = (unit(key), write_strength(key)) if delta else (key, None)
        return recurrent_weights(query, direction, position, log_decay(key), strength)

    return weights


def _recurrence(log_decay: Callable[[jax.Array], jax.Array], delta: bool = False) -> Workload:
    """Returns the workload of a recurrence: each token writes and reads the state once."""
    return Workload(
        _recurrent(log_decay, delta),
        lambda length: length * HEAD_SIZE,
        lambda length: length,
    )


def _softmax_over(left: int | float, right: int | float) -> Workload:
    def pairs(length):
        position = np.arange(length)
        return int((np.minimum(left, position) + np.minimum(right, position[::-1]) + 1).sum())

    return Workload(lambda q, k, i: _softmax(q, k, i, left, right), pairs, pairs)


def _longformer(side: int, first: int) -> Workload:
    """Returns a window with the first tokens global; checked rows are not global."""

    def pairs(length):
        row = np.arange(first, length)
        near = np.minimum(row + side, length - 1) - np.maximum(row - side, first) + 1
        return int(min(first, length) * length + (near + first).sum())

    return Workload(lambda q, k, i: _softmax(q, k, i, side, side, first), pairs, pairs)


WORKLOADS = {
    "causal": _softmax_over(np.inf, 0),
    "bidirectional": _softmax_over(np.inf, np.inf),
    "window": _softmax_over(*WINDOW),
    "sparse": _longformer(SPARSE_WINDOW, SPARSE_GLOBAL),
    "linear": Workload(
        linear_weights, lambda length: length * HEAD_SIZE, lambda length: 2 * length * HEAD_SIZE
    ),
    "retention": _recurrence(lambda key: jnp.asarray(_RETENTION)),
    "scalar gate": _recurrence(lambda key: scalar_gate(key)[..., None]),
    "vector gate": _recurrence(vector_gate),
    "delta rule": _recurrence(lambda key: jnp.zeros(()), delta=True),
    "gated delta rule": _recurrence(lambda key: scalar_gate(key)[..., None], delta=True),
}


def draw(length: int) -> Arrays:
    """Draws query, key, value and output gradient: normal float32 `(1, T, N, H)` each."""
    draws = np.random.default_rng(0)
    shape = (1, length, HEADS, HEAD_SIZE)
    return [draws.standard_normal(shape, dtype=np.float32) for _ in range(4)]


def checked_rows(length: int) -> np.ndarray:
    """Returns the queries at which results are checked, including the last.

    The first queries are left out: they have few keys, and gradients much larger than all others.
    """
    # With 16 tokens two of the rows are equal.
    return np.unique(np.linspace(length // 16, length - 1, 16).astype(int))


def only_rows(gradient: Any, rows: np.ndarray, heads: slice = slice(None)) -> jax.Array:
    """Returns the output gradient, set to zero outside these rows and heads of the first example.

    The gradients of all keys and values then depend on these rows only.
    """
    where = np.index_exp[:1, rows, heads]
    return jnp.zeros_like(gradient).at[where].set(gradient[where])


def expected(
    weights: Callable[..., jax.Array], arrays: Arrays, rows: np.ndarray, which: str
) -> list[np.ndarray]:
    """Returns the output at the rows in float64 and, for the backward pass, all gradients.

    Args:
      weights: weights of a workload, a function of query, key, positions and further arrays.
      arrays: `(1, T, N, ...)` each, with the output gradient last.
      rows: queries; the output gradient is that of `only_rows`.
      which: one of `PASSES`.
    """

    def attend(query, key, value, *others):  # (T, N, H), (S, N, H), (S, N, H), (S, N, ...)
        positions = jnp.asarray(rows)[:, None]
        by_head = [a.swapaxes(0, 1) for a in (query[rows], key, *others)]
        return jnp.einsum("nrs,snh->rnh", weights(*by_head[:2], positions, *by_head[2:]), value)

    with jax.enable_x64(True):
        *inputs, gradient = (jnp.asarray(np.asarray(a[0]), jnp.float64) for a in arrays)
        if which == "forward":
            return [np.asarray(attend(*inputs))]
        out, pull_back = jax.vjp(attend, *inputs)
        return [np.asarray(a) for a in (out, *pull_back(gradient[rows]))]


def relative_error(results: Arrays, wanted: Arrays, rows: np.ndarray) -> float:
    """Returns the largest error, relative to the largest expected element of each array."""
    out, *gradients = (np.asarray(array, np.float64)[0] for array in results)
    errors = [
        np.abs(got - want).max() / np.abs(want).max()
        for got, want in zip((out[rows], *gradients), wanted, strict=True)
    ]
    return float(np.max(errors))  # NaN if any error is NaN
