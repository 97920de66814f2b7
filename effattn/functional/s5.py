"""S5: one diagonal state space with many inputs and outputs, by a scan over time."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.arrays import checks, dtypes, state_spaces
from effattn.arrays.axes import lead
from effattn.cores import passed_states, sequence_parts, token_mixing
from effattn.cores.token_mixing import cleared
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, TokenMixing, declared
from effattn.xla.linear_scan import linear_scan


class Options(Direction, TokenMixing, total=False):
    """The shared options of `s5_scan`."""


def naive(x, pairs, *, rate, input, output, step_size, skip, initial_state=None):
    """x `(T, D)`, rate A and step size `(P,)`, B `(P, D)`, C `(D, P)`, or `(2, D, P)` both ways."""
    logs = step_size * rate
    written = x @ ((jnp.exp(logs) - 1) / rate * input.T)  # (T, P)
    distance = pairs.i[:, None] - pairs.j

    def states(seen):
        powers = jnp.exp(logs * jnp.abs(distance)[..., None])  # (T, T, P)
        return (jnp.where((pairs.allowed & seen)[..., None], powers, 0) * written).sum(1)

    past = states(distance >= 0)
    last = jnp.max(jnp.where(pairs.present, pairs.j, -1), initial=-1)
    powers = jnp.exp(logs * (last - pairs.j)[:, None])
    state = (jnp.where(pairs.reaches_final[:, None], powers, 0) * written).sum(0)
    if initial_state is not None:
        from_start = jnp.exp(logs * (pairs.i[:, None] + 1)) * initial_state
        past = past + jnp.where(pairs.reads_initial[:, None], from_start, 0)
        state = state + jnp.exp(logs * (last + 1)) * initial_state
    if output.ndim == 2:
        y = past @ output.T
    else:
        y = past @ output[0].T + states(distance <= 0) @ output[1].T
    y = 2 * y.real
    return (y if skip is None else y + skip * x), state


@with_naive(over_pairs(naive, heads=False, wide=True))
@jax.named_scope("s5_scan")
@declared
def s5_scan(
    x: jax.Array,
    *,
    rate: jax.Array,
    input: jax.Array,
    output: jax.Array,
    step_size: jax.Array,
    skip: jax.Array | None = None,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""A diagonal state space with D inputs and outputs, the core of S5.

    Smith et al. 2022, "Simplified State Space Layers for Sequence Modeling".

    The state has P modes, one of each conjugate pair. With a zero-order hold over the step sizes
    dt,

        s_t = exp(dt A) s_(t-1) + (exp(dt A) - 1) / A (B x_t);    y_t = 2 Re(C s_t) + d x_t

    A bidirectional call has a second output matrix C', for the same recurrence from the last token
    to the first, and adds 2 Re(C' s'_t). Time is O(T P (D + log c)) for chunks of c = 64 tokens,
    memory O(T (P + D)); the state has P numbers a row.

    Args:
      x: `(B, T, D)`.
      rate: A, `(P,)` complex; nonzero, with real parts of 0 or less, checked if concrete.
      input: B, `(P, D)` complex.
      output: C, `(D, P)` complex if causal, else `(2, D, P)`, C and C'.
      step_size: dt, `(P,)`, 0 or more, checked if concrete.
      skip: d, `(D,)`, or None for no skip term.
      **options: direction, lengths, packing and state: see `effattn.options`. Only causal calls
        have a state.

    Returns:
      `(B, T, D)` in the dtype of `x`; with `return_state`, `(y, state)`, the state `(B, P)`
      complex. Computed in at least float32.

    Raises:
      ValueError: shapes, dtypes or options that do not fit; rates or steps of the wrong sign.
    """
    x, valid, starts = token_mixing.check("s5_scan", {"x": x}, **options)
    batch, time, features = x.shape
    is_causal, initial = options.get("is_causal", False), options.get("initial_state")
    if not is_causal and (initial is not None or options.get("return_state")):
        raise ValueError(
            "initial_state and return_state need is_causal=True, as the tokens after a part of a "
            "sequence change its outputs, got is_causal=False; leave them out"
        )
    wide, directions = dtypes.wide(x.dtype), () if is_causal else (2,)
    rate = state_spaces.rates("rate", rate, ("P",), wide)
    (modes,) = rate.shape
    input = state_spaces.complex_numbers("input", input, (modes, features), wide)
    output = state_spaces.complex_numbers("output", output, (*directions, features, modes), wide)
    step_size = state_spaces.steps(step_size, (modes,)).astype(wide)
    if initial is None:
        initial = jnp.zeros((batch, modes), rate.dtype)
    state = state_spaces.complex_numbers("initial_state", initial, (batch, modes), wide)
    logs = dtypes.product(step_size, rate)
    matrix, powers = (jnp.expm1(logs) / rate)[:, None] * input, jnp.exp(logs)
    added = _written(x, matrix)
    decay = _decays(powers, added, valid, starts)
    if is_causal:
        state, after = _passed(decay, added, state)
        states = linear_scan(decay, added, state)
        y = _read(states, output)
        if after is None:
            after = states[:, -1] if time else state
    else:
        sequence_parts.refuse("s5_scan without is_causal=True")
        y, after = _read(linear_scan(decay, added, state), output[0]), None
        decay = _decays(powers, added, valid, token_mixing.ends(valid, starts))
        later = linear_scan(jnp.flip(decay, 1), jnp.flip(added, 1), state)
        y = y + _read(jnp.flip(later, 1), output[1])
    if skip is not None:
        weight = checks.shaped("skip", skip, (features,)).astype(y.dtype)
        y = y + dtypes.product(lead(weight, 3), x)
    y = cleared(y, valid).astype(x.dtype)
    return (y, after) if options.get("return_state") else y


def _decays(powers, added, valid, starts):
    """Decays of all tokens, `(B, T, P)`: 0 at the start of a document, and 1 in padding."""
    decay = jnp.broadcast_to(powers, added.shape)
    if valid is not None:
        decay = jnp.where(valid[..., None], decay, 1)
    return decay if starts is None else jnp.where(starts[..., None], 0, decay)


# Products of real numbers: XLA's products of complex numbers are many times slower on CPUs.


def _written(x, matrix):
    """B x_t, complex `(B, T, P)`."""
    parts = jnp.stack([matrix.real, matrix.imag])
    return lax.complex(*jnp.einsum("btd,rpd->rbtp", x.astype(parts.dtype), parts))


def _read(states, output):
    """2 Re(C s_t), `(B, T, D)`."""
    parts = jnp.stack([states.real, -states.imag])
    return 2 * jnp.einsum("rbtp,rdp->btd", parts, jnp.stack([output.real, output.imag]))


def _passed(decay, added, state):
    """The state before this device's part of a sequence, and that after the whole sequence.

    Outside of `sequence_parts.along`, the results are `state` and None.
    """
    parts = sequence_parts.parts_for("s5_scan", "pass_states")
    if parts is None:
        return state, None
    pair = decay.prod(1), linear_scan(decay, added, jnp.zeros_like(state))[:, -1]
    return passed_states.chained(parts, pair, state, lambda before, p: p[0] * before + p[1])


registry.register(
    registry.Mechanism(
        name="s5",
        family="state space",
        paper="Smith et al. 2022, Simplified State Space Layers for Sequence Modeling",
        function=s5_scan,
        takes_heads=False,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "segments", "decode"}),
        builder="effattn.nn.s5:S5",
        complexity="O(N P D)",
        time_exponent=1.0,
        knows_order=True,
    )
)
