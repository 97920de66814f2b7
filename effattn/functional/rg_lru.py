"""RG-LRU: the real-gated linear recurrent unit of Griffin, a gated average of each feature."""

from typing import Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.cores import passed_states, recurrence, sequence_parts, token_mixing
from effattn.cores.token_mixing import cleared
from effattn.naive import over_tokens, with_naive
from effattn.options import TokenMixing, declared
from effattn.xla.linear_scan import linear_scan

SHARPNESS = 8.0  # c of the paper


def naive(state, x, recurrence_gate, input_gate, *, log_decay):
    """One token: the state, x and both gates `(D,)`."""
    log_a = 8 * recurrence_gate * log_decay
    room = 1 - jnp.exp(2 * log_a)
    weight = jnp.where(room > 0, jnp.sqrt(jnp.where(room > 0, room, 1)), 0)
    state = jnp.exp(log_a) * state + weight * input_gate * x
    return state, state


@with_naive(over_tokens(naive, heads=False, empty=lambda x, **_: jnp.zeros_like(x)))
@jax.named_scope("rg_lru")
@declared
def rg_lru(
    x: jax.Array,
    recurrence_gate: jax.Array,
    input_gate: jax.Array,
    *,
    log_decay: jax.Array,
    **options: Unpack[TokenMixing],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Real-gated linear recurrent unit (De et al. 2024, "Griffin").

    For each feature separately, with the recurrence gate r, the input gate i and c = 8:

        a_t = a^(c r_t);    h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t x_t

    The output is h. The recurrence is always causal. Time is O(T D log C) for chunks of C = 64
    tokens, memory O(T D); the state has D numbers a row. The derivative of the root is 0 where a_t
    is 1.

    Args:
      x: `(B, T, D)`.
      recurrence_gate: r, `(B, T, D)`, in [0, 1], checked if concrete, of the dtype of x; 0 keeps
        the state.
      input_gate: i, `(B, T, D)`, of the dtype of x.
      log_decay: log a, `(D,)`, 0 or less, checked if concrete.
      **options: lengths, packing and state: see `effattn.options.TokenMixing`.

    Returns:
      `(B, T, D)` in the dtype of `x`; with `return_state`, `(h, state)`, the state `(B, D)` in at
      least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit, a gate outside of [0, 1], a log decay above 0,
        or a state together with `segment_ids`.
    """
    given = {"x": x, "recurrence_gate": recurrence_gate, "input_gate": input_gate}
    x, recurrence_gate, input_gate, valid, starts = token_mixing.check("rg_lru", given, **options)
    checks.between("recurrence_gate", recurrence_gate, 0, 1)
    batch, _, features = x.shape
    dtype, wide = x.dtype, dtypes.wide(x.dtype)
    log_decay = recurrence.check_log_decay(log_decay, (features,)).astype(wide)
    # Gates of padding are zero, so that it leaves the state as it is.
    log_a = SHARPNESS * recurrence_gate.astype(wide) * lead(log_decay, 3)
    decay, added = jnp.exp(log_a), _root(-jnp.expm1(2 * log_a)) * (input_gate * x).astype(wide)
    if starts is not None:
        decay = jnp.where(starts[..., None], 0, decay)
    state = options.get("initial_state")
    if state is None:
        state = jnp.zeros((batch, features), wide)
    state = checks.shaped("initial_state", state, (batch, features)).astype(wide)
    state, after = _passed(decay, added, state)
    states = linear_scan(decay, added, state)
    h = cleared(states, valid).astype(dtype)
    if after is None:
        after = states[:, -1] if states.shape[1] else state
    return (h, after) if options.get("return_state") else h


def _root(x):
    """The square root; the derivative at 0 is 0."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def _passed(decay, added, state):
    """The state before this device's part of a sequence, and that after the whole sequence.

    Outside of `sequence_parts.along`, the results are `state` and None.
    """
    parts = sequence_parts.parts_for("rg_lru", "pass_states")
    if parts is None:
        return state, None
    pair = decay.prod(1), linear_scan(decay, added, jnp.zeros_like(state))[:, -1]
    return passed_states.chained(parts, pair, state, lambda before, p: p[0] * before + p[1])


registry.register(
    registry.Mechanism(
        name="rg_lru",
        family="recurrent",
        paper="De et al. 2024, Griffin: Mixing Gated Linear Recurrences with Local Attention",
        function=rg_lru,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.rg_lru:RGLRU",
        complexity="O(N D)",
        time_exponent=1.0,
        knows_order=True,
    )
)
