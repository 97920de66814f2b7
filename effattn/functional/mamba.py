"""Selective scan of Mamba: a diagonal state space model with data-dependent step sizes."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes, state_spaces
from effattn.arrays.axes import lead
from effattn.cores import recurrence
from effattn.cores.diagonal_recurrence import diagonal_recurrence
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.naive import over_tokens, with_naive
from effattn.options import Implementation, Packing, Padding, State, declared
from effattn.xla.diagonal_recurrence import own_chunk


class Options(Padding, Packing, State, Implementation, total=False):
    """The shared options of `selective_scan`."""


def naive(state, query, key, value, *, step_size, rate, skip=None):
    """One token of one head: state `(F, D)`, C and B `(F,)`, x and dt `(D,)`, A `(D, F)`."""
    C, B, x, dt, A, D = query, key, value, step_size, rate, skip
    state = jnp.exp(A.T * dt) * state + jnp.outer(B, dt * x)
    out = C @ state
    return state, out if D is None else out + D * x


@with_naive(over_tokens(naive, per_token=("step_size",), per_head={"rate": 2, "skip": 1}))
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
    r"""Selective scan of Mamba (Gu and Dao 2023, "Mamba").

    In the symbols of the paper, for one head of D values, each with its own step size dt:

        S_t = exp(A^T * dt_t) * S_(t-1) + B_t (dt_t * x_t)^T;    out_t = S_t^T C_t + d * x_t

    * is elementwise, and dt_t is the same for all F entries of a value. C is the query, B the key,
    x the value; Mamba has one head of all values. Always causal. Time is O(T F D), memory
    O(T (F + D) + T F D / c + c F D) for chunks of c tokens: states between chunks are stored for
    the backward pass, and states inside a chunk are recomputed one chunk at a time. In the CPU
    kernel c is 128 to 1024. The state has F x D numbers a key head.

    Args:
      query: C, `(*B, T, N, F)`, with any number of batch dimensions; F is the state size.
      key: B, `(*B, T, K, F)`, N a multiple of K: query head n reads key head n // (N // K).
      value: x, `(*B, T, K, D)`.
      step_size: dt (after the softplus), `(*B, T, K, D)`, 0 or more, checked if concrete.
      rate: A, `(K, D, F)`, 0 or less, checked if concrete.
      skip: d, `(K, D)`, or None for no skip term; requires N = K.
      chunk_size: tokens between two stored states in XLA; tuning only.
      **options: padding, packing, state and implementation: see `effattn.options`.

    Returns:
      `(*B, T, N, D)` in the dtype of `value`; with `return_state`, `(out, state)`, the state
      `(*B, K, F, D)` in the promoted dtype of the inputs, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options, a rate above 0, or a negative step size.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = recurrence.check(
        query, key, value, chunk_size=own_chunk() if chunk_size is None else chunk_size, **options
    )
    checks.known_length("selective_scan", given.query)
    value, (heads, size) = given.value, given.value.shape[-2:]
    steps = state_spaces.steps(step_size, value.shape)
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
                "skip needs as many query heads as key heads, because it adds values to the "
                f"outputs of their heads, got {given.query.shape[-2]} query heads and {heads} key "
                "heads; leave skip out"
            )
        weight = checks.shaped("skip", skip, (heads, size)).astype(given.dtype)
        present = clear(clear(value, given.tokens.key_mask), given.tokens.query_mask)
        direct = dtypes.product(lead(weight, value.ndim), present)
        out = (out.astype(direct.dtype) + direct).astype(value.dtype)
    return recurrence.results(out, state, given)


def _terms(_, query, keys) -> Terms:
    """Returns terms that are only used for their shapes."""
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
