"""Rotary position embedding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes
from effattn.arrays.angles import angles
from effattn.arrays.axes import lead


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding:
    """Rotary position embedding: rotates pairs of features by angles proportional to the position.

    Features m and m + H/2 form a pair, rotated by `position / scaling * theta**(-2m / H)`, so that
    the product of a query and a key depends on their distance, not on absolute positions. Su et al.
    2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding"; the linear scaling is
    from Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation".

    Attributes:
      theta: base of the wavelengths; a larger base gives slower rotation.
      scaling: divisor of positions; 4.0 maps four times the trained length to the trained angles.
    """

    theta: float = 10000.0
    scaling: float = 1.0

    def __post_init__(self):
        for name in ("theta", "scaling"):
            checks.positive(f"rotary {name}", getattr(self, name))

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates queries or keys.

        Args:
          x: `(*B, T, N, H)`, H even.
          positions: `(T,)` or `(*B, T)`, int.

        Returns:
          Rotated array with the shape and dtype of `x`. Cosines and sines are computed in float32,
          or the dtype of x if wider, with an error below 1e-6 at all positions (see
          `effattn.arrays.angles`).

        Raises:
          ValueError: an odd head dimension, or positions that are not integers.
        """
        head_dim = x.shape[-1]
        if head_dim % 2:
            raise ValueError(f"x must have an even head size for rotary embedding, got {head_dim}")
        dtype = dtypes.wide(x.dtype)
        positions = checks.as_array("positions", positions)
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ValueError(f"positions must be integers, got dtype {positions.dtype}")
        frequency = self.theta ** (-np.arange(0, head_dim, 2) / head_dim) / self.scaling
        place = lead(positions[..., None, None], x.ndim)
        frequency = frequency.reshape((1,) * (x.ndim - 1) + (-1,))
        angle = angles(place, frequency, dtype)  # (*#B, T, 1, H / 2)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        first, second = jnp.split(x.astype(dtype), 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated.astype(x.dtype)
