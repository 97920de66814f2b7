"""Attention with linear biases (ALiBi), as a `score_mod`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Slope of each head, `(N,)` float32.

    If N is a power of two, the slopes are 2**(-8/N), 2**(-16/N), ..., 2**-8. For other N, the
    slopes are those of the next lower power of two, then every second slope of the next higher
    power of two.
    """
    num_heads = checks.at_least("num_heads", num_heads, 1, "heads")
    lower = 1 << (num_heads.bit_length() - 1)
    upper = 2 * lower
    slopes = 2.0 ** (-8 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-8 / upper * np.arange(1, upper, 2))
    return np.concatenate([slopes, between[: num_heads - lower]]).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Alibi:
    """ALiBi as a `score_mod`: subtracts the head's slope times |i - j| from each logit.

    Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation". Two instances with the same number of heads are equal, so a compiled function is
    reused.

    Attributes:
      num_heads: N, number of query heads.
    """

    num_heads: int

    def __post_init__(self):
        checks.at_least("num_heads", self.num_heads, 1, "heads")

    def __call__(self, logit, b, h, i, j) -> jax.Array:
        """Biased logit of query position i and key position j in head h."""
        slope = jnp.asarray(alibi_slopes(self.num_heads), logit.dtype)[h]
        return logit - slope * jnp.abs(i - j).astype(logit.dtype)
