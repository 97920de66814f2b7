"""The selective scan of Mamba: every entry of the state decays by its own rate and step."""

from typing import Any, Unpack

import jax

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.cores import recurrence
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.options import Implementation, Packing, Padding, State, declared
from effattn.xla.diagonal_recurrence import CHUNK, diagonal_recurrence


class Options(Padding, Packing, State, Implementation, total=False):
    """The shared options of `selective_scan`."""


@declared
def selective_scan(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    step_size: jax.Array,
    rate: jax.Array,
    skip: jax.Array | None = None,
    chunk_size: int | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""The selective scan of Mamba (Gu and Dao 2023, "Mamba").

    With the paper's names in brackets, for one head of D values, each with a step dt of its own:

        S_t = exp(A^T * dt_t) * S_(t-1) + B_t (dt_t * x_t)^T;    out_t = S_t^T C_t + D * x_t

    * is by entry, and dt_t the same for all F entries of a value. C is the query, B the key, x the
    value; Mamba has one head of all values. It is always causal. Time is O(T F D), memory
    O(T (F + D) + T F D / C + C F D), where the states between chunks of C tokens are kept for the
    backward pass and those within, with their decays, are made a chunk at a time; the state has
    F x D numbers a key head.

    Args:
      query: `(*B, T, N, F)` [C], with any number of batch dimensions; F is the paper's state size.
      key: `(*B, T, K, F)` [B], N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, D)` [x].
      step_size: `(*B, T, K, D)` [dt, after its softplus], positive.
      rate: `(K, D, F)` [A], 0 or less, which is checked where it is concrete.
      skip: `(K, D)` [D], with as many query heads as key heads; None has none.
      chunk_size: tokens between two states that are kept; tuning only.
      **options: padding, packing, state and implementation: see `effattn.options`.

    Returns:
      `(*B, T, N, D)` in the dtype of `value`; with `return_state`, `(out, state)`, the state
      `(*B, K, F, D)` in the promoted dtype of the inputs, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, or a rate above 0.
      NotImplementedError: an implementation that it does not have.
    """
    given = recurrence.check(
        query, key, value, chunk_size=CHUNK if chunk_size is None else chunk_size, **options
    )
    checks.known_length("selective_scan", given.query)
    value, (heads, size) = given.value, given.value.shape[-2:]
    steps = checks.shaped("step_size", step_size, value.shape)
    out, state = recurrence.run(
        "selective_scan",
        _terms,
        given,
        given.query,
        (given.key, value, steps),
        recurrence.check_log_decay(rate, (heads, size, given.key.shape[-1]), "rate"),
        attend=diagonal_recurrence,
    )
    if skip is not None:
        if given.query.shape[-2] != heads:
            raise ValueError(
                "skip adds values to outputs, head by head, and needs as many query heads as key "
                f"heads, got {given.query.shape[-2]} and {heads}"
            )
        weight = checks.shaped("skip", skip, (heads, size)).astype(given.dtype)
        present = clear(clear(value, given.tokens.key_mask), given.tokens.query_mask)
        direct = dtypes.product(lead(weight, value.ndim), present)
        out = (out.astype(direct.dtype) + direct).astype(value.dtype)
    return recurrence.results(out, state, given)


def _terms(_, query, keys) -> Terms:
    """For their shapes alone."""
    key, value, _ = keys
    return Terms(query, key, value)


registry.register(
    registry.Mechanism(
        name="mamba",
        family="recurrent",
        paper="Gu and Dao 2023, Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
        function=selective_scan,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.mamba:Mamba",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N F D)",
        time_exponent=1.0,
        knows_order=True,
    )
)
