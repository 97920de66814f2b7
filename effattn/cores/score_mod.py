"""Score functions (`score_mod`): those that mechanisms define, and closure conversion."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import dtypes, mesh_axes
from effattn.options import ScoreMod


class Score:
    """Base class of `score_mod`s that mechanisms define; subclasses are frozen dataclasses.

    Equal instances without arrays reuse one compiled program. A new function compiles anew at
    each call.
    """

    def __call__(self, logit, b, h, i, j) -> jax.Array:
        """The logit of query i and key j."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Then(Score):
    """Affine map of logits, applied after the caller's `score_mod`.

    Attributes:
      before: the caller's `score_mod`; None for none.
      multiply: factor.
      add: summand.
    """

    before: ScoreMod | None = None
    multiply: float = 1.0
    add: float = 0.0

    def __call__(self, logit, b, h, i, j) -> jax.Array:
        """The logit of query i and key j."""
        logit = logit if self.before is None else self.before(logit, b, h, i, j)
        return logit * self.multiply + self.add


def without_closure(score_mod: ScoreMod, like: tuple[jax.Array, ...]):
    """Closure conversion: `score_mod` with its closed-over arrays as an argument, and the arrays.

    A custom VJP gives gradients to its arguments only, and only its arguments may be tracers of an
    enclosing transformation. The traced logits vary over the same mesh axes as the arrays `like`.
    """
    example, *_ = mesh_axes.vary_alike(like)
    dtype = dtypes.wide(*like)
    # NumPy scalars, because JAX arrays would be placed on the current mesh.
    logit = mesh_axes.vary_like(example, np.zeros((), dtype))
    index = mesh_axes.vary_like(example, np.zeros((), np.int32))
    with mesh_axes.within_placed(example, "score_mod"):
        traced = jax.make_jaxpr(score_mod)(logit, index, index, index, index)
    results = traced.out_avals
    if len(results) != 1 or results[0].shape or not jnp.issubdtype(results[0].dtype, jnp.floating):
        raise ValueError(
            "score_mod(logit, b, h, i, j) must return one floating-point scalar for scalar "
            f"arguments, got {', '.join(str(r) for r in results) or 'nothing'}"
        )

    if isinstance(score_mod, Score) and not traced.consts:
        return _NoConstants(score_mod), ()

    def with_constants(constants, *args):
        return jax.core.eval_jaxpr(traced.jaxpr, constants, *args)[0]

    constants = tuple(jnp.asarray(c) for c in traced.consts)
    # Traced again without the arrays: the jit cache keeps `score_mod` alive, and `traced` holds
    # the closed-over arrays.
    with mesh_axes.within_placed(example, "score_mod"):
        free = jax.make_jaxpr(with_constants)(constants, logit, index, index, index, index)

    def without_arrays(constants, *args):
        return jax.core.eval_jaxpr(free.jaxpr, free.consts, *constants, *args)[0]

    return without_arrays, constants


@dataclasses.dataclass(frozen=True)
class _NoConstants:
    """Adapter that drops the empty `constants` argument."""

    score_mod: Score

    def __call__(self, constants, *args):
        return self.score_mod(*args)
