"""Rotary position embedding."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes
from effattn.arrays.angles import angles
from effattn.arrays.axes import lead

_RULES = ("linear", "ntk", "yarn", "llama3")
# Turns over the trained length below which a pair of features is slowed down by the whole factor,
# and above which it keeps its speed.
_TURNS = {"yarn": (1.0, 32.0), "llama3": (1.0, 4.0)}


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding:
    """Rotary position embedding: rotates pairs of features by angles proportional to the position.

    Among R rotated features, m and m + R/2 form a pair, rotated by `position * f_m`, so that the
    product of a query and a key depends on their distance, not on absolute positions. By default
    f_m = theta**(-2m / R). To read sequences s = `scaling` times as long as those of the training,
    a rule changes the f_m:

    - "linear" divides all f_m by s (Chen et al. 2023, "Extending Context Window of Large Language
      Models via Positional Interpolation").
    - "ntk" multiplies theta by s**(R / (R - 2)), which divides the slowest f_m by s and keeps the
      fastest.
    - "yarn" divides the f_m of pairs that turn less than `turns[0]` times over the trained length,
      keeps those that turn more than `turns[1]` times, and blends both linearly in m between them.
      The rotated features are multiplied by 0.1 log(s) + 1, or by 1 for s < 1 (Peng et al. 2023,
      "YaRN", as in the code of the authors; the formula of the paper blends as "llama3" does).
    - "llama3" divides and keeps as "yarn" does, blends linearly in the number of turns, and
      multiplies the features by 1 (Llama Team 2024, "The Llama 3 Herd of Models").

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".

    Attributes:
      theta: base of the wavelengths; a larger base gives slower rotation.
      scaling: s, the factor between the new and the trained length.
      rule: "linear", "ntk", "yarn" or "llama3".
      trained_length: number of positions of the training, for "yarn" and "llama3".
      turns: the two numbers of turns of "yarn" (default 1 and 32) and "llama3" (default 1 and 4).
      amplitude: factor of the rotated features; default that of the rule.
      features: R, number of rotated features of each head, the first ones; default all.
    """

    theta: float = 10000.0
    scaling: float = 1.0
    rule: str = "linear"
    trained_length: int | None = None
    turns: tuple[float, float] | None = None
    amplitude: float | None = None
    features: int | None = None

    def __post_init__(self):
        for name in ("theta", "scaling"):
            checks.positive(f"rotary {name}", getattr(self, name))
        checks.one_of("rotary rule", self.rule, _RULES)
        by_turns = self.rule in _TURNS
        for name in ("trained_length", "turns"):
            if getattr(self, name) is not None and not by_turns:
                raise ValueError(
                    f"rotary {name} is for the rules {' and '.join(_TURNS)}, got {name}="
                    f"{getattr(self, name)!r} with rule={self.rule!r}; leave {name} out"
                )
        if by_turns:
            if self.trained_length is None:
                raise ValueError(
                    f"rotary rule={self.rule!r} needs trained_length, the number of positions of "
                    "the training, got None"
                )
            checks.at_least("rotary trained_length", self.trained_length, 1, "positions")
            if self.theta == 1:
                raise ValueError(f"rotary theta must not be 1 with rule={self.rule!r}, got 1")
        if self.turns is not None:
            needs = "two numbers above 0, the smaller one first"
            if not isinstance(self.turns, tuple | list) or len(self.turns) != 2:
                raise ValueError(f"rotary turns must be {needs}, got {self.turns!r}")
            low, high = (checks.positive("rotary turns", turns) for turns in self.turns)
            if low >= high:
                raise ValueError(f"rotary turns must be {needs}, got {self.turns!r}")
            object.__setattr__(self, "turns", (low, high))  # a list has no hash
        if self.amplitude is not None:
            checks.positive("rotary amplitude", self.amplitude)
        if self.features is not None:
            checks.at_least("rotary features", self.features, 2, "features, or None")
            if self.features % 2:
                raise ValueError(f"rotary features must be even, got {self.features}")

    def check_head(self, head_dim: int) -> int:
        """Returns the number of rotated features of a head.

        Raises `ValueError` if `head_dim` is odd, or less than `features`.
        """
        if self.features is None and head_dim % 2:
            raise ValueError(f"x must have an even head size for rotary embedding, got {head_dim}")
        if self.features is not None and self.features > head_dim:
            raise ValueError(
                f"x must have heads of at least the {self.features} features that the rotary "
                f"embedding rotates, got {head_dim}"
            )
        return head_dim if self.features is None else self.features

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair of features, float64 `(R / 2,)`."""
        rotated = self.check_head(head_dim)
        pairs = np.arange(0, rotated, 2) / rotated
        if self.rule == "ntk":
            slowest = rotated - 2
            exponent = rotated / slowest if slowest else 0.0
            return (self.theta * self.scaling**exponent) ** -pairs
        own = self.theta**-pairs
        if self.rule == "linear":
            return own / self.scaling
        kept = self._kept(own, rotated)
        return own * kept + own / self.scaling * (1 - kept)

    def _kept(self, own: np.ndarray, rotated: int) -> np.ndarray:
        """Shares of the pairs of features that keep their speed, from 0 to 1."""
        assert self.trained_length is not None
        slow, fast = _TURNS[self.rule] if self.turns is None else self.turns
        if self.rule == "llama3":
            turns = self.trained_length * own / (2 * np.pi)
            return np.clip((turns - slow) / (fast - slow), 0, 1)

        def pair_of(turns):
            radians = 2 * np.pi * turns
            return rotated * np.log(self.trained_length / radians) / (2 * np.log(self.theta))

        first = max(np.floor(pair_of(fast)), 0)
        last = max(min(np.ceil(pair_of(slow)), rotated - 1), first + 1e-3)
        return 1 - np.clip((np.arange(rotated // 2) - first) / (last - first), 0, 1)

    def _amplitude(self) -> float:
        if self.amplitude is not None:
            return self.amplitude
        return 0.1 * math.log(max(self.scaling, 1.0)) + 1 if self.rule == "yarn" else 1.0

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates queries or keys.

        Args:
          x: `(*B, T, N, H)`, H even, or at least `features`.
          positions: `(T,)` or `(*B, T)`, int.

        Returns:
          Rotated array with the shape and dtype of `x`. Cosines and sines are computed in float32,
          or the dtype of x if wider, with an error below 1e-6 at all positions (see
          `effattn.arrays.angles`).

        Raises:
          ValueError: an odd or too small head dimension, an x that is not floating point, or
            positions that are not integers of these shapes.
        """
        rotated = self.check_head(x.shape[-1])
        dtype = dtypes.wide(x.dtype)
        positions = checks.as_array("positions", positions)
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ValueError(f"positions must be integers, got dtype {positions.dtype}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x must be floating point, got dtype {x.dtype}")
        if positions.shape[-1:] != x.shape[-3:-2] or not _fits(positions.shape, x.shape[:-2]):
            raise ValueError(
                f"positions must have shape (T,) or (*B, T) for x of shape {x.shape}, got "
                f"{positions.shape}"
            )
        frequency = self.frequencies(x.shape[-1]).reshape((1,) * (x.ndim - 1) + (-1,))
        place = lead(positions[..., None, None], x.ndim)
        angle = angles(place, frequency, dtype)  # (*#B, T, 1, R / 2)
        cos, sin = (self._amplitude() * wave for wave in (jnp.cos(angle), jnp.sin(angle)))
        turning, rest = x[..., :rotated], x[..., rotated:]
        first, second = jnp.split(turning.astype(dtype), 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate([*(each.astype(x.dtype) for each in turned), rest], axis=-1)


def _fits(shape, whole):
    """True if an array of the first shape can be broadcast to the second."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, full) for size, full in pairs)


def check_rotary(rotary: RotaryEmbedding | None, **sizes: int) -> None:
    """Checks the option `rotary` of a mixer, and the sizes of the heads that it rotates.

    Args:
      rotary: the option.
      **sizes: features of the heads, by the name of the option that sets them.

    Raises:
      ValueError: another type, or heads that the embedding cannot rotate.
    """
    if rotary is None:
        return
    if not isinstance(rotary, RotaryEmbedding):
        raise ValueError(f"rotary must be a RotaryEmbedding or None, got {rotary!r}")
    for name, size in sizes.items():
        if rotary.features is None and size % 2:
            raise ValueError(
                f"rotary needs an even {name}, got {size}; give an even {name} or rotary=None"
            )
        if rotary.features is not None and rotary.features > size:
            raise ValueError(
                f"rotary rotates {rotary.features} features, but {name} is {size}; give a larger "
                f"{name} or fewer features of the RotaryEmbedding"
            )
