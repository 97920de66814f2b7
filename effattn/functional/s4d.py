"""S4D: diagonal state space models of each feature, run as convolutions or recurrences."""

from typing import Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes, state_spaces
from effattn.arrays.axes import lead
from effattn.cores import diagonal_spaces, token_mixing
from effattn.cores.diagonal_spaces import Rows, Space
from effattn.cores.token_mixing import cleared
from effattn.naive import over_tokens, with_naive
from effattn.options import TokenMixing, declared


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

        s_t = exp(dt A) s_(t-1) + (exp(dt A) - 1) / A x_t;    y_t = 2 Re(C . s_t) + d x_t

    The convolution is y = K * x + d x with K_t = 2 Re(sum_m C_m (exp(dt A_m) - 1) / A_m
    exp(dt A_m t)), in time O(T D (log T + M)) and memory O(T D + sqrt(T) D M). The recurrence runs
    chunk by chunk in time O(T D M) and memory O(T D).

    Args:
      x: `(B, T, D)`.
      rate: A, `(D, M)` complex; nonzero, with real parts of 0 or less, checked if concrete.
      output: C, `(D, M)` complex; B is all ones, because only the product B C matters.
      step_size: dt, `(D,)`, 0 or more, checked if concrete.
      skip: d, `(D,)`, or None for no skip term.
      method: "convolution" or "recurrence". None selects the convolution, or, with `segment_ids`,
        the recurrence.
      **options: lengths, packing and state: see `effattn.options.TokenMixing`.

    Returns:
      `(B, T, D)` in the dtype of `x`; with `return_state`, `(y, state)`, the state `(B, D, M)`
      complex. Computed in at least float32. By the convolution, later tokens change earlier outputs
      by rounding errors (`causality="rounding"`).

    Raises:
      ValueError: shapes, dtypes or options that do not fit; rates or steps of the wrong sign;
        packed documents by convolution.
    """
    if method not in (None, "convolution", "recurrence"):
        raise ValueError(f'method must be "convolution", "recurrence" or None, got {method!r}')
    if options.get("segment_ids") is not None and method == "convolution":
        raise ValueError(
            "segment_ids needs method='recurrence' or None, got method='convolution', which "
            "reaches across documents"
        )
    x, valid, starts = token_mixing.check("s4_convolution", {"x": x}, **options)
    initial, (batch, _, features) = options.get("initial_state"), x.shape
    dtype, wide = x.dtype, dtypes.wide(x.dtype)
    rate = state_spaces.rates("rate", rate, (features, "M"), wide)
    output = state_spaces.complex_numbers("output", output, rate.shape, wide)
    step_size = state_spaces.steps(step_size, (features,)).astype(wide)
    logs = dtypes.product(step_size[:, None], rate)
    given, u = (batch, *rate.shape), x.astype(wide)
    state = None
    if initial is not None:
        state = state_spaces.complex_numbers("initial_state", initial, given, wide)
    y, last = diagonal_spaces.mix(
        "s4_convolution",
        u,
        Space(logs, jnp.expm1(logs) / rate, output),
        state,
        Rows(valid, starts),
        by_recurrence=method == "recurrence",
    )
    if skip is not None:
        y = y + lead(checks.shaped("skip", skip, (features,)).astype(wide), 3) * u
    y = cleared(y, valid).astype(dtype)
    return (y, last) if options.get("return_state") else y


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
