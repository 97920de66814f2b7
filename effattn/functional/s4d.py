"""S4D: diagonal state space models of each feature, run as convolutions or recurrences."""

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from, within
from effattn.cores import passed_states, sequence_parts, token_mixing
from effattn.cores.token_mixing import cleared
from effattn.naive import over_tokens, with_naive
from effattn.options import TokenMixing, declared
from effattn.xla.linear_scan import linear_scan
from effattn.xla.long_convolution import long_convolution

# Tokens in a chunk of the recurrence.
_CHUNK = 64


def naive(state, x, *, rate, output, step_size, skip):
    """One token: x `(D,)`; state, rate A and output C `(D, M)` complex, step size dt `(D,)`."""
    decay = jnp.exp(step_size[:, None] * rate)
    state = decay * state + (decay - 1) / rate * x[:, None]
    y = 2 * (output * state).sum(1).real
    return state, y if skip is None else y + skip * x


def _empty(x, rate, **_):
    return jnp.zeros(rate.shape, jnp.result_type(x, rate))


@with_naive(over_tokens(naive, heads=False, empty=_empty))
@jax.named_scope("s4_convolution")
@declared
def s4_convolution(
    x: jax.Array,
    *,
    rate: jax.Array,
    output: jax.Array,
    step_size: jax.Array,
    skip: jax.Array | None = None,
    method: str | None = None,
    **options: Unpack[TokenMixing],
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
      method: "convolution" or "recurrence". None selects the convolution, or, with `segment_ids`,
        the recurrence.
      **options: lengths, packing and state: see `effattn.options.TokenMixing`.

    Returns:
      `(B, T, D)` in the dtype of `x`; with `return_state`, `(y, state)`, the state `(B, D, M)`
      complex. Computed in at least float32. By the convolution, later tokens change earlier outputs
      by rounding errors (`causality="rounding"`).

    Raises:
      ValueError: shapes, dtypes or options that do not fit; packed documents by convolution.
    """
    if method not in (None, "convolution", "recurrence"):
        raise ValueError(f'method must be "convolution", "recurrence" or None, got {method!r}')
    if options.get("segment_ids") is not None and method == "convolution":
        raise ValueError(
            "segment_ids needs method='recurrence' or None, got method='convolution', which "
            "reaches across documents"
        )
    x, valid, starts = token_mixing.check("s4_convolution", {"x": x}, **options)
    initial, lengths = options.get("initial_state"), options.get("lengths")
    batch, time, features = x.shape
    dtype, wide = x.dtype, dtypes.wide(x.dtype)
    rate, output = (_complex(n, a, features, wide) for n, a in (("rate", rate), ("output", output)))
    if rate.shape != output.shape:
        raise ValueError(
            f"rate and output must have the same shape, got {rate.shape} and {output.shape}"
        )
    step_size = checks.shaped("step_size", step_size, (features,)).astype(wide)
    logs = dtypes.product(step_size[:, None], rate)
    written = jnp.expm1(logs) / rate
    given, u = (batch, *rate.shape), x.astype(wide)
    state = jnp.zeros(given, rate.dtype) if initial is None else jnp.asarray(initial)
    if state.shape != given or not jnp.iscomplexobj(state):
        raise ValueError(
            f"initial_state must be complex of shape {given}, got {state.dtype} of shape "
            f"{state.shape}"
        )
    state = state.astype(rate.dtype)
    by_recurrence = starts is not None or method == "recurrence"

    def last_from(state):
        if by_recurrence:
            return _recurrence(u, jnp.exp(logs), written, output, state, valid, starts)[1]
        return _last(u, logs, written, state, lengths)

    count = jnp.full((batch,), time) if valid is None else valid.sum(1)
    state, after = _passed(last_from, logs, state, count, starts)
    if by_recurrence:
        y, last = _recurrence(u, jnp.exp(logs), written, output, state, valid, starts)
    else:
        y = long_convolution(u, _kernel(logs, output * written, time))
        if initial is not None or after is not None:
            y = y + _seen(logs, output, state, time)
        last = last_from(state)
    if skip is not None:
        y = y + lead(checks.shaped("skip", skip, (features,)).astype(wide), 3) * u
    y = cleared(y, valid).astype(dtype)
    return (y, last if after is None else after) if options.get("return_state") else y


def _passed(last_from, logs, state, count, starts):
    """The state before this device's part of a sequence, and that after the whole sequence.

    `last_from(state)` is the state after this part, of `count (B,)` valid tokens. Outside of
    `sequence_parts.along`, the results are `state` and None.
    """
    parts = sequence_parts.taken("s4_convolution", "pass_states")
    if parts is None:
        return state, None
    kept = jnp.exp(dtypes.product(logs[None], count[:, None, None]))
    if starts is not None:
        kept = jnp.where(starts.any(1)[:, None, None], 0, kept)
    pair = kept, last_from(jnp.zeros_like(state))
    return passed_states.chained(
        parts, pair, state, lambda before, pair: pair[0] * before + pair[1]
    )


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
    u, decay, written, output, state = mesh_axes.vary_alike((u, decay, written, output, state))
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
