"""State-space duality: the selective state space of Mamba-2, as masked attention in chunks."""

from typing import Any, Unpack

import jax

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.options import Recurrent, declared


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
    r"""The state space of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs").

    With the paper's names in brackets, for one head and its step size dt_t > 0:

        S_t = exp(dt_t A) S_(t-1) + dt_t B_t x_t^T;    out_t = S_t^T C_t + D x_t

    C is the query, B the key, x the value. It is always causal. Time is O(T (C + F) P) for chunks
    of C tokens, memory O(T), the state F x P numbers a value head.

    Args:
      query: `(*B, T, N, F)` [C], with any number of batch dimensions; F is the paper's state size.
      key: `(*B, T, K, F)` [B].
      value: `(*B, T, V, P)` [x]. Of the numbers of heads N, K and V, all K or one of N and V a
        multiple of it: in Mamba-2 many value heads share a key and a query head, head v those of
        v // (V // K).
      step_size: `(*B, T, V)` [dt, after its softplus], positive.
      rate: `(V,)` [A], 0 or less, which is checked where it is concrete.
      skip: `(V,)` [D]; with as many value heads as query heads. None has none.
      **options: padding, packing, state and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, max(N, V), P)` in the dtype of `value`; with `return_state`, `(out, state)`, the
      state `(*B, V, F, P)` in the promoted dtype of the inputs, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, or a rate above 0.
      NotImplementedError: an implementation that it does not have.
      TypeError: in forward-mode differentiation.
    """
    given = recurrence.check(query, key, value, value_heads=True, **options)
    heads, value = given.value.shape[-2], given.value
    steps = checks.shaped("step_size", step_size, value.shape[:-1])
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
                "skip adds values to outputs, head by head, and needs no fewer value heads than "
                f"query heads, got {heads} and {given.query.shape[-2]}"
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
        paper="Dao and Gu 2024, Transformers are SSMs",
        function=state_space_duality,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.mamba2:Mamba2",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N F P)",
        time_exponent=1.0,
        knows_order=True,
    )
)
