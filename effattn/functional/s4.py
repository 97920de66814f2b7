"""S4: linear state space models of each feature, run as convolutions or recurrences."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from, within
from effattn.functional.rwkv4 import check_tokens_by_feature
from effattn.xla.linear_scan import linear_scan
from effattn.xla.long_convolution import long_convolution

# Tokens in a chunk of the recurrence, and frequencies of a kernel in memory at a time.
_CHUNK, _FREQUENCIES = 64, 256


@jax.named_scope("s4_convolution")
@checks.checked
def s4_convolution(
    x: jax.Array,
    *,
    rate: jax.Array,
    output: jax.Array,
    step_size: jax.Array,
    skip: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    method: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""A diagonal state space, S4D (Gu et al. 2022, "On the Parameterization of S4D").

    Each feature has 2 M modes in conjugate pairs; A holds the M complex rates of the first of each
    pair. With a zero-order hold over the step size dt,

        s_t = exp(dt A) s_(t-1) + (exp(dt A) - 1) / A x_t;    y_t = 2 Re(C . s_t) + D x_t

    The convolution is y = K * x + D x with K_t = 2 Re(sum_m C_m (exp(dt A_m) - 1) / A_m
    exp(dt A_m t)), in time O(T D (log T + M)) and memory O(T D + sqrt(T) D M). The recurrence runs
    chunk by chunk in time O(T D M) and memory O(T D).

    Args:
      x: `(B, T, D)`.
      rate: A, `(D, M)` complex; nonzero, with real parts of 0 or less.
      output: C, `(D, M)` complex; B is all ones, because only the product B C matters.
      step_size: dt, `(D,)`, positive.
      skip: D, `(D,)`, or None for no skip term.
      lengths: `(B,)` int, valid tokens of each row; padding gives zeros and keeps the state.
      segment_ids: int `(B, T)`: each run of equal ids is a separate document; 0 is padding.
      initial_state: the state before the first token, from an earlier call.
      return_state: also return the state after the last valid token.
      method: "convolution" or "recurrence". None selects the convolution, or, with `segment_ids`,
        the recurrence.

    Returns:
      `(B, T, D)` in the dtype of `x`; with `return_state`, `(y, state)`, the state `(B, D, M)`
      complex. Computed in at least float32. By the convolution, later tokens change earlier outputs
      by rounding errors (`causality="rounding"`).

    Raises:
      ValueError: shapes, dtypes or options that do not fit; packed documents by convolution.
    """
    if method not in (None, "convolution", "recurrence"):
        raise ValueError(f'method must be "convolution", "recurrence" or None, got {method!r}')
    if segment_ids is not None and method == "convolution":
        raise ValueError("a convolution reaches across documents; segment_ids need the recurrence")
    x, valid, starts = check_tokens_by_feature({"x": x}, lengths, segment_ids, initial_state)
    batch, time, features = x.shape
    dtype, wide = x.dtype, dtypes.wide(x.dtype)
    rate, output = (_complex(n, a, features, wide) for n, a in (("rate", rate), ("output", output)))
    if rate.shape != output.shape:
        raise ValueError(f"rate and output must be alike, got {rate.shape} and {output.shape}")
    step_size = checks.shaped("step_size", step_size, (features,)).astype(wide)
    logs = dtypes.product(step_size[:, None], rate)
    written = jnp.expm1(logs) / rate
    given, u = (batch, *rate.shape), x.astype(wide)
    state = jnp.zeros(given, rate.dtype) if initial_state is None else jnp.asarray(initial_state)
    if state.shape != given or not jnp.iscomplexobj(state):
        raise ValueError(
            f"initial_state must be complex of shape {given}, got {state.dtype} of shape "
            f"{state.shape}"
        )
    state = state.astype(rate.dtype)
    if starts is not None or method == "recurrence":
        y, state = _recurrence(u, jnp.exp(logs), written, output, state, valid, starts)
    else:
        y = long_convolution(u, _kernel(logs, output * written, time))
        if initial_state is not None:
            y = y + _seen(logs, output, state, time)
        state = _last(u, logs, written, state, lengths)
    if skip is not None:
        y = y + lead(checks.shaped("skip", skip, (features,)).astype(wide), 3) * u
    if valid is not None:
        y = jnp.where(valid[..., None], y, 0)
    y = y.astype(dtype)
    return (y, state) if return_state else y


def _complex(name: str, value: Any, features: int, dtype: Any) -> jax.Array:
    value = jnp.asarray(value)
    if value.ndim != 2 or value.shape[0] != features or not jnp.iscomplexobj(value):
        raise ValueError(
            f"{name} must be complex of shape ({features}, M), got {value.dtype} of shape "
            f"{value.shape}"
        )
    return value.astype(dtypes.common(dtype, jnp.complex64))


def _split(time):
    """Splits `time` in blocks: returns their number and size, both near the square root."""
    size = max(1, math.isqrt(time))
    return -(-time // size), size


def _powers(logs, count, stride=1, first=0):
    """Returns exp(logs (first + stride n)) for n < count, `(..., count)`."""
    steps = lead(first + stride * jnp.arange(count), logs.ndim + 1)
    return jnp.exp(dtypes.product(logs[..., None], steps))


def _kernel(logs, weights, time):
    """Returns 2 Re sum_m weights_m exp(logs_m t), `(T, D)`, by powers of blocks and in blocks."""
    blocks, size = _split(time)
    of_blocks = weights[..., None] * _powers(logs, blocks, size)
    kernel = jnp.einsum("dma,dmb->dab", of_blocks, _powers(logs, size))
    return 2 * kernel.real.reshape(logs.shape[0], -1)[:, :time].T


def _seen(logs, output, state, time):
    """Returns the contribution of the initial state to all outputs, `(B, T, D)`."""
    blocks, size = _split(time)
    of_blocks = (state * output[None])[..., None] * _powers(logs, blocks, size, first=1)[None]
    seen = jnp.einsum("rdma,dmb->rabd", of_blocks, _powers(logs, size))
    return 2 * seen.real.reshape(state.shape[0], blocks * size, logs.shape[0])[:, :time]


def _last(u, logs, written, state, lengths):
    """Returns the state after the last valid token."""
    batch, time, features = u.shape
    blocks, size = _split(time)
    u = jnp.pad(u, ((0, 0), (blocks * size - time, 0), (0, 0)))
    count = jnp.full((batch,), time) if lengths is None else lengths
    if lengths is not None:
        # Right-align the valid tokens, so that the place of a token gives its power.
        at = positions_from(count - time, blocks * size)
        moved = jnp.take_along_axis(u, at[..., None], 1, mode="clip")
        fits = ~within(blocks * size - count, blocks * size)
        u = jnp.where(fits[..., None], moved, 0)
    u = u.reshape(batch, blocks, size, features)
    inside, between = _powers(logs, size)[..., ::-1], _powers(logs, blocks, size)[..., ::-1]
    of_blocks = jnp.einsum("rabd,dmb->radm", u.astype(logs.dtype), inside)
    added = jnp.einsum("radm,dma->rdm", of_blocks, between)
    logs_read = dtypes.product(logs[None], count[:, None, None])
    return jnp.exp(logs_read) * state + added * written[None]


def _recurrence(u, decay, written, output, state, valid, starts):
    """Runs the recurrence chunk by chunk; the backward pass recomputes the states."""
    batch, time, features = u.shape
    chunk = max(1, min(_CHUNK, time))

    def chunks(array):
        if array is None:
            return None
        array = jnp.pad(array, ((0, 0), (0, -time % chunk), *[(0, 0)] * (array.ndim - 2)))
        array = array.reshape(batch, -(-time // chunk), chunk, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    @jax.checkpoint
    def step(before, of_chunk):
        u, valid, starts = of_chunk
        shape = (batch, chunk, *decay.shape)
        kept = jnp.broadcast_to(decay, shape)
        if starts is not None:
            kept = jnp.where(starts[..., None, None], 0, kept)
        kept = jnp.where(valid[..., None, None], kept, 1)
        added = jnp.where(valid[..., None, None], dtypes.product(u[..., None], lead(written, 4)), 0)
        states = linear_scan(kept, added, before)
        return states[:, -1], 2 * jnp.einsum("rtdm,dm->rtd", states, output).real

    valid = jnp.ones((batch, time), bool) if valid is None else valid
    state, y = lax.scan(step, state, tuple(map(chunks, (u, valid, starts))))
    return lax.collapse(jnp.moveaxis(y, 0, 1), 1, 3)[:, :time], state


def low_rank_kernel(
    rate: jax.Array,
    low_rank: jax.Array,
    input: jax.Array,
    truncated_output: jax.Array,
    step_size: jax.Array,
    length: int,
) -> jax.Array:
    r"""Convolution kernel of S4 (Gu et al. 2022, "Efficiently Modeling ...", algorithm 1).

    The state matrix is A = diag(L) - P P^*. The bilinear discretisation with step size dt gives

        Abar = (2/dt - A)^-1 (2/dt + A);   Bbar = 2 (2/dt - A)^-1 B;   K_t = C Abar^t Bbar

    With C~ = C (I - Abar^length) and w_m = 1 / ((2/dt) (1 - z) - L_m (1 + z)), the Woodbury
    identity gives the Fourier transform of the kernel at the roots of unity z:

        2 (C~ w B - (1 + z) (C~ w P) (P^* w B) / (1 + (1 + z) P^* w P))

    where each product sums over modes and their conjugates. Time is O(length D (M + log length)),
    memory O(length D).

    Args:
      rate: L, `(D, M)` complex; the first of each of M conjugate pairs of modes.
      low_rank: P, `(D, M)` complex.
      input: B, `(D, M)` complex.
      truncated_output: C~, `(D, M)` complex.
      step_size: dt, `(D,)`.
      length: number of taps of the kernel.

    Returns:
      `(length, D)` real.
    """
    count = length // 2 + 1
    blocks = -(-count // _FREQUENCIES)
    half = np.arange(blocks * _FREQUENCIES) % (length or 1)
    roots = np.exp(-2j * np.pi * half / length).reshape(blocks, -1)
    conjugate = jnp.conj

    @jax.checkpoint
    def of_block(z):
        """Returns the transform at frequencies z, `(D, frequencies)`."""
        difference = dtypes.product((2 / step_size)[:, None, None], (1 - z)[None, :, None])
        rest = (1 + z)[None, :, None]
        w = 1 / (difference - rate[:, None] * rest)
        w_conjugate = 1 / (difference - conjugate(rate)[:, None] * rest)

        def product(a, b):
            weight = (a * b)[:, None]
            return (weight * w + conjugate(weight) * w_conjugate).sum(-1)

        both = conjugate(low_rank)
        through = product(truncated_output, low_rank) * product(both, input)
        rank_one = (1 + z)[None] * through / (1 + (1 + z)[None] * product(both, low_rank))
        return 2 * (product(truncated_output, input) - rank_one)

    spectrum = lax.map(of_block, jnp.asarray(roots, rate.dtype))
    spectrum = jnp.moveaxis(spectrum, 0, 1).reshape(rate.shape[0], -1)[:, :count]
    return jnp.fft.irfft(spectrum, length, axis=-1).T


def hippo(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the modes of HiPPO-LegS: rates, low rank P and input B, each `(size / 2,)` complex.

    The matrix A_nk = -sqrt(2n + 1) sqrt(2k + 1) below the diagonal, -(n + 1) on it, plus P P^T with
    P_n = sqrt(n + 1/2), is normal. In the basis of its eigenvectors, A is diag(rates) - P P^*. The
    input is B_n = sqrt(2n + 1). Modes come in conjugate pairs; one mode of each pair is returned.
    """
    n = np.arange(size)
    low_rank, input = np.sqrt(n + 0.5), np.sqrt(2 * n + 1)
    matrix = -np.tril(np.outer(input, input), -1) - np.diag(n + 1)
    normal = matrix + np.outer(low_rank, low_rank)
    # `normal` is -1/2 times the identity plus a skew-symmetric matrix, i times a Hermitian matrix.
    A_imag, vectors = np.linalg.eigh(-1j * (normal + 0.5 * np.eye(size)))
    first = slice(size // 2, None)
    to_modes = vectors.conj().T[first]
    return -0.5 + 1j * A_imag[first], to_modes @ low_rank, to_modes @ input


registry.register(
    registry.Mechanism(
        name="s4d",
        family="state space",
        paper="Gu et al. 2022, On the Parameterization and Initialization of Diagonal State "
        "Space Models",
        function=s4_convolution,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.s4d:S4D",
        complexity="O(N D (log N + M))",
        time_exponent=1.0,
        causality="rounding",
        knows_order=True,
    )
)
registry.register(
    registry.Mechanism(
        name="s4",
        family="state space",
        paper="Gu et al. 2022, Efficiently Modeling Long Sequences with Structured State Spaces",
        function=None,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "decode"}),
        reasons={
            "segments": "its kernel is of a Fourier transform, which reaches across documents"
        },
        builder="effattn.nn.s4:S4",
        complexity="O(N D (log N + M))",
        time_exponent=1.0,
        causality="rounding",
        knows_order=True,
    )
)
