"""Hyena recurrence: alternating long convolutions and gates."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.cores import sequence_parts, token_mixing
from effattn.cores.token_mixing import cleared
from effattn.naive import over_pairs, with_naive
from effattn.options import Lengths, Packing, declared
from effattn.xla.long_convolution import long_convolution


class Options(Lengths, Packing, total=False):
    """The shared options of `hyena_convolution`."""


def naive(value, pairs, *, gates, filters, skip):
    """Value `(T, D)`, gates `(T, N, D)`, filters `(N, L, D)`, skip `(N, D)` or None."""
    z = value
    for n, taps in enumerate(filters):
        matrix = taps[jnp.clip(pairs.i[:, None] - pairs.j, 0)]  # (T, T, D)
        convolved = (jnp.where(pairs.allowed[..., None], matrix, 0) * z).sum(1)
        if skip is not None:
            convolved = convolved + skip[n] * z
        z = gates[:, n] * convolved
    return z


def _gates_of_tokens(*, gates, filters, **_):
    return {"gates": jnp.moveaxis(jnp.asarray(gates), 0, -2), "filters": jnp.asarray(filters)}


@with_naive(
    over_pairs(naive, per_token=("gates",), derived=_gates_of_tokens, heads=False, wide=True)
)
@sequence_parts.over_channels(("gates", "value"), {"filters": -1, "skip": -1})
@jax.named_scope("hyena_convolution")
@declared
def hyena_convolution(
    gates: jax.Array,
    value: jax.Array,
    filters: jax.Array,
    *,
    skip: jax.Array | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    r"""Hyena recurrence (Poli et al. 2023, "Hyena Hierarchy", definition 3.1).

    For each feature separately, with causal convolutions * over time,

        z^1 = v;   z^(n+1) = x^n (h^n * z^n + d^n z^n);   y = z^(N+1)

    Time is O(N T D log T) by Fourier transforms, with `segment_ids` O(N T D log^2 T); memory is
    O(N T D).

    Args:
      gates: x, `(N, B, T, D)`, for order N.
      value: v, `(B, T, D)`.
      filters: h, `(N, L, D)`, L at least T.
      skip: d, `(N, D)`, weight of the input of each convolution in its output; None means 0.
      **options: lengths and packing: see `effattn.options`.

    Returns:
      `(B, T, D)` in the dtype of `value`; convolved in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit, or filters shorter than the sequence.
    """
    value, valid, _ = token_mixing.check("hyena_convolution", {"value": value}, **options)
    ids = options.get("segment_ids")
    ids = None if ids is None else jnp.asarray(ids)
    order, (_, time, features) = gates.shape[0] if gates.ndim else 0, value.shape
    gates = cleared(checks.shaped("gates", gates, (order, *value.shape)), valid)
    check_filters(filters, order, time, features)
    if skip is not None:
        skip = checks.shaped("skip", skip, (order, features))
    z = value
    for n in range(order):
        convolved = long_convolution(z, filters[n], segment_ids=ids)
        z = gated(gates[n], convolved, z, None if skip is None else skip[n])
    return z


def gated(gate: jax.Array, convolved: jax.Array, z: jax.Array, skip: jax.Array | None) -> jax.Array:
    """Returns one step of the recurrence, x (h * z + d z), in the dtype of z."""
    if skip is not None:
        convolved = convolved + dtypes.product(lead(skip.astype(convolved.dtype), z.ndim), z)
    return dtypes.product(gate, convolved).astype(z.dtype)


def check_filters(filters: jax.Array, order: int, time: int, features: int) -> None:
    """Raises `ValueError` unless filters are real `(order, L, features)` with L >= `time`."""
    shape: tuple[Any, ...] = filters.shape
    if len(shape) != 3 or (shape[0], shape[2]) != (order, features) or shape[1] < time:
        raise ValueError(
            f"filters must have shape ({order}, L, {features}) with L at least the {time} tokens, "
            f"got {shape}; make them for a greater max_length"
        )
    checks.shaped("filters", filters, shape)


registry.register(
    registry.Mechanism(
        name="hyena",
        family="attention-free",
        paper="Poli et al. 2023, Hyena Hierarchy: Towards Larger Convolutional Language Models",
        function=hyena_convolution,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.hyena:Hyena",
        complexity="O(N log N D), O(N D) a step",
        time_exponent=1.0,
        causality="rounding",
        knows_order=True,
    )
)
