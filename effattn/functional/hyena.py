"""Hyena recurrence: alternating long convolutions and gates."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.arrays.segments import within
from effattn.xla.long_convolution import long_convolution


@jax.named_scope("hyena_convolution")
@checks.checked
def hyena_convolution(
    gates: jax.Array,
    value: jax.Array,
    filters: jax.Array,
    *,
    skip: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> jax.Array:
    r"""Hyena recurrence (Poli et al. 2023, "Hyena Hierarchy", definition 3.1).

    For each feature separately, with causal convolutions * over time,

        z^1 = v;   z^(n+1) = x^n (h^n * z^n + d^n z^n);   y = z^(N+1)

    Time is O(N T D log T) by Fourier transforms, memory O(N T D).

    Args:
      gates: x, `(N, B, T, D)`, for order N.
      value: v, `(B, T, D)`.
      filters: h, `(N, L, D)`, L at least T.
      skip: d, `(N, D)`, weight of the input of each convolution in its output; None means 0.
      lengths: `(B,)` int, valid tokens of each row; padding gives zeros.

    Returns:
      `(B, T, D)` in the dtype of `value`; convolved in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit, or filters shorter than the sequence.
    """
    gates, value, filters = map(jnp.asarray, (gates, value, filters))
    if value.ndim != 3 or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"value must be floating point of shape (B, T, D), got {value.dtype} of shape "
            f"{value.shape}"
        )
    checks.known_length("hyena_convolution", value, axis=-2)
    batch, time, features = value.shape
    order = gates.shape[0] if gates.ndim else 0
    gates = checks.shaped("gates", gates, (order, *value.shape))
    check_filters(filters, order, time, features)
    if skip is not None:
        skip = checks.shaped("skip", skip, (order, features))
    lengths = checks.lengths("lengths", lengths, (batch,))
    z, valid = value, None
    if lengths is not None:
        valid = within(lengths, time)[..., None]
        z, gates = jnp.where(valid, z, 0), jnp.where(valid[None], gates, 0)
    for n in range(order):
        z = gated(gates[n], long_convolution(z, filters[n]), z, None if skip is None else skip[n])
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
        capabilities=frozenset({"causal", "lengths", "decode"}),
        reasons={"segments": "a Fourier transform convolves across the borders of documents"},
        builder="effattn.nn.hyena:Hyena",
        complexity="O(N log N D), O(N D) a step",
        time_exponent=1.0,
        causality="rounding",
        knows_order=True,
    )
)
