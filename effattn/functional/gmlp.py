"""Spatial gating of gMLP: tokens are gated by a learned mixture of all tokens."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.arrays.segments import within


@jax.named_scope("spatial_gating")
@checks.checked
def spatial_gating(
    gate: jax.Array,
    value: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    *,
    is_causal: bool = False,
    lengths: jax.Array | None = None,
) -> jax.Array:
    r"""Spatial gating unit of gMLP (Liu et al. 2021, "Pay Attention to MLPs", section 2.1).

        y_t = gate_t * (sum_s W_ts value_s + b_t)

    The weights are learned and the same for all features. Time is O(T^2 F), memory O(T F) in
    addition to the weights.

    Args:
      gate: `(B, T, F)`, z_1 in the paper.
      value: `(B, T, F)`, the normalised z_2 in the paper.
      weights: W, `(L, L)`, with L at least T.
      bias: b, `(L,)`.
      is_causal: treat entries of W above the diagonal as zeros.
      lengths: `(B,)` int, valid tokens of each row; padding gives zeros and is ignored.

    Returns:
      `(B, T, F)` in the dtype of `value`; summed in at least float32.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    gate, value, weights = map(jnp.asarray, (gate, value, weights))
    if value.ndim != 3 or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"value must be floating point of shape (B, T, F), got {value.dtype} of shape "
            f"{value.shape}"
        )
    checks.known_length("spatial_gating", value, axis=-2)
    batch, time, _ = value.shape
    gate = checks.shaped("gate", gate, value.shape)
    size = weights.shape[0] if weights.ndim else 0
    weights = checks.shaped("weights", weights, (size, size))
    bias = checks.shaped("bias", bias, (size,))
    if size < time:
        raise ValueError(f"weights are for {size} tokens, got {time}")
    lengths = checks.lengths("lengths", lengths, (batch,))
    if lengths is not None:
        valid = within(lengths, time)[..., None]
        gate, value = jnp.where(valid, gate, 0), jnp.where(valid, value, 0)
    weights = weights[:time, :time]
    return gated(gate, value, jnp.tril(weights) if is_causal else weights, bias[:time])


def gated(gate: jax.Array, value: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns the gated mixture; weights `(T, S)` or `(B, T, S)`, biases `(T,)` or `(B, T)`."""
    wide = dtypes.wide(value.dtype)
    weights = weights.astype(value.dtype)
    mixed = jnp.matmul(weights, value, preferred_element_type=wide)
    return (gate.astype(wide) * (mixed + lead(bias.astype(wide)[..., None], 3))).astype(value.dtype)


registry.register(
    registry.Mechanism(
        name="gmlp",
        family="attention-free",
        paper="Liu et al. 2021, Pay Attention to MLPs",
        function=spatial_gating,
        takes_heads=False,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "decode"}),
        reasons={"segments": "its weights are of positions in a row, not in a document"},
        builder="effattn.nn.gmlp:GatedMLP",
        complexity="O(N^2 D), O(N D) a step; weights of N^2",
        time_exponent=2.0,
        memory_exponent=2.0,
        knows_order=True,
    )
)
