"""State-space duality: the state space model of Mamba-2, as masked attention in chunks."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes, state_spaces
from effattn.arrays.axes import lead
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


def naive(state, query, key, value, *, step_size, rate, skip=None):
    """One token of one head: state `(F, P)`, C and B `(F,)`, x `(P,)`, and numbers dt, A and D."""
    C, B, x, dt, A, D = query, key, value, step_size, rate, skip
    state = jnp.exp(dt * A) * state + dt * jnp.outer(B, x)
    out = C @ state
    return state, out if D is None else out + D * x


@with_naive(over_tokens(naive, per_token=("step_size",), per_head={"rate": 0, "skip": 0}))
@declared
def state_space_duality(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    step_size: jax.Array,
    rate: jax.Array,
    skip: jax.Array | None = None,
    **options: Unpack[Recurrent],
) -> Any:
    r"""State space model of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs").

    In the symbols of the paper, for one head with step size dt_t > 0:

        S_t = exp(dt_t A) S_(t-1) + dt_t B_t x_t^T;    out_t = S_t^T C_t + D x_t

    C is the query, B the key, x the value. Always causal. Time is O(T (c + F) P) for chunks of c
    tokens, memory O(T), state F x P numbers a value head.

    Args:
      query: C, `(*B, T, N, F)`, with any number of batch dimensions; F is the state size.
      key: B, `(*B, T, K, F)`.
      value: x, `(*B, T, V, P)`. N and V are K, or one of them is a multiple of K. In Mamba-2,
        value head v uses key and query head v // (V // K).
      step_size: dt (after the softplus), `(*B, T, V)`, 0 or more, checked if concrete.
      rate: A, `(V,)`, 0 or less, checked if concrete.
      skip: D, `(V,)`, or None for no skip term; requires V >= N.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, max(N, V), P)` in the dtype of `value`; with `return_state`, `(out, state)`, the
      state `(*B, V, F, P)` in the promoted dtype of the inputs, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, a rate above 0, or a negative step size.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = recurrence.check(query, key, value, value_heads=True, **options)
    heads, value = given.value.shape[-2], given.value
    steps = state_spaces.steps(step_size, value.shape[:-1])
    out, state = recurrence.run(
        "state_space_duality",
        _terms,
        given,
        given.query,
        (given.key, value, steps),
        recurrence.check_log_decay(rate, (heads,), "rate"),
    )
    if skip is not None:
        if given.query.shape[-2] > heads:
            raise ValueError(
                "skip needs at least as many value heads as query heads, because it adds values "
                f"to the outputs of their heads, got {given.query.shape[-2]} query heads and "
                f"{heads} value heads; leave skip out"
            )
        weight = checks.shaped("skip", skip, (heads,)).astype(given.dtype)
        present = clear(clear(value, given.tokens.key_mask), given.tokens.query_mask)
        direct = dtypes.product(lead(weight[:, None], value.ndim), present)
        out = (out.astype(direct.dtype) + direct).astype(value.dtype)
    return recurrence.results(out, state, given)


def _terms(rate, query, keys) -> Terms:
    key, value, step_size = keys
    log_decay = dtypes.product(step_size, lead(rate, step_size.ndim))
    return Terms(query, key, dtypes.product(value, step_size[..., None]), log_decay=log_decay)


registry.register(
    registry.Mechanism(
        name="mamba2",
        family="recurrent",
        paper="Dao and Gu 2024, Transformers are SSMs: Generalized Models and Efficient "
        "Algorithms Through Structured State Space Duality",
        function=state_space_duality,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.mamba2:Mamba2",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N F P)",
        time_exponent=1.0,
        knows_order=True,
    )
)
