"""H3: gates around a diagonal state space that reads outer products of keys and values."""

from typing import Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import dtypes, state_spaces
from effattn.cores import token_mixing
from effattn.cores.token_mixing import cleared
from effattn.functional.s4d import s4_convolution
from effattn.naive import over_tokens, with_naive
from effattn.options import TokenMixing, declared


def naive(state, query, key, value, *, rate, output, step_size, skip):
    """One token `(N H,)` of N heads; rate A and output C `(N, M)`, state `(N, M, H, H)`."""
    q, k, v = (x.reshape(len(rate), -1) for x in (query, key, value))
    product = k[:, :, None] * v[:, None]
    decay = jnp.exp(step_size[:, None] * rate)
    written = (decay - 1) / rate
    state = decay[..., None, None] * state + written[..., None, None] * product[:, None]
    read = 2 * (output[..., None, None] * state).sum(1).real
    if skip is not None:
        read = read + skip[:, None, None] * product
    return state, (q[:, :, None] * read).sum(1).ravel()


def _empty(query, rate, **_):
    size = query.shape[-1] // len(rate)
    return jnp.zeros((*rate.shape, size, size), jnp.result_type(query, rate))


@with_naive(over_tokens(naive, heads=False, empty=_empty))
@jax.named_scope("h3_mixing")
@declared
def h3_mixing(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    rate: jax.Array,
    output: jax.Array,
    step_size: jax.Array,
    skip: jax.Array | None = None,
    **options: Unpack[TokenMixing],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Multiplicative gates around a diagonal state space, the core of H3.

    Fu et al. 2022, "Hungry Hungry Hippos: Towards Language Modeling with State Space Models".

    For each of N heads of H features, with the convolution kernel K of a diagonal state space (see
    `s4_convolution`),

        y_t = q_t^T sum_(s <= t) K_(t - s) k_s v_s^T + d (q_t . k_t) v_t

    The state space is the same for all H x H entries of the outer product of a head. Time is
    O(T N H^2 log T + T N M), memory O(T N H^2), by Fourier transforms; packed documents run as a
    recurrence in O(T N H^2 M).

    Args:
      query: `(B, T, N H)`.
      key: `(B, T, N H)`, in the dtype of the query. In H3, a short convolution of the keys comes
        first.
      value: `(B, T, N H)`, in the dtype of the query.
      rate: A, `(N, M)` complex, one of each pair of modes; nonzero, with real parts of 0 or less,
        checked if concrete. The number of heads is that of its rows.
      output: C, `(N, M)` complex.
      step_size: dt, `(N,)`, 0 or more, checked if concrete.
      skip: d, `(N,)`, or None for no skip term.
      **options: lengths, packing and state: see `effattn.options.TokenMixing`.

    Returns:
      `(B, T, N H)` in the dtype of `value`; with `return_state`, `(y, state)`, the state
      `(B, N, M, H, H)` complex. Computed in at least float32.

    Raises:
      ValueError: shapes, dtypes or options that do not fit; rates or steps of the wrong sign.
    """
    given = {"query": query, "key": key, "value": value}
    query, key, value, valid, _ = token_mixing.check("h3_mixing", given, **options)
    batch, time, features = value.shape
    heads = rate.shape[0] if rate.ndim == 2 else 0
    if heads == 0 or features % heads:
        raise ValueError(
            f"rate must have shape (N, M), with N heads that divide the {features} features, got "
            f"{rate.shape}"
        )
    dtype, wide = value.dtype, dtypes.wide(value.dtype)
    size = features // heads
    q, k, v = (x.astype(wide).reshape(batch, time, heads, size) for x in (query, key, value))
    initial = options.get("initial_state")
    if initial is not None:
        shape = batch, *rate.shape, size, size
        initial = state_spaces.complex_numbers("initial_state", initial, shape, wide)

    def convolve(x, state):
        return s4_convolution(
            x,
            rate=rate,
            output=output,
            step_size=step_size,
            skip=skip,
            lengths=options.get("lengths"),
            segment_ids=options.get("segment_ids"),
            initial_state=state,
            return_state=True,
        )

    for _ in range(2):  # over the rows and the columns of the outer products
        convolve = jax.vmap(convolve, in_axes=-1, out_axes=-1)
    read, state = convolve(k[..., None] * v[..., None, :], initial)
    y = jnp.einsum("btnh,btnhd->btnd", q, read).reshape(value.shape)
    y = cleared(y, valid).astype(dtype)
    return (y, state) if options.get("return_state") else y


registry.register(
    registry.Mechanism(
        name="h3",
        family="state space",
        paper="Fu et al. 2022, Hungry Hungry Hippos: Towards Language Modeling with State Space "
        "Models",
        function=h3_mixing,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.h3:H3",
        complexity="O(N D (H log N + M / H))",
        time_exponent=1.0,
        causality="rounding",
        knows_order=True,
    )
)
