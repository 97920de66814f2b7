"""Dynamic scaling of the loss, so that gradients in float16 neither vanish nor overflow."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

START = 2.0**15
GROWTH_STEPS = 200
MOST = 2.0**24


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Factor of the loss (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

    A step with infinite or NaN gradients changes no parameter and halves the factor; the factor
    doubles after `GROWTH_STEPS` steps with finite gradients. The state is the factor, float32 `()`,
    and the int32 number of such steps since it changed.

    Attributes:
      dynamic: False for no scaling.
    """

    dynamic: bool

    def init(self) -> tuple[jax.Array, ...]:
        """Returns the state at the start."""
        return (jnp.float32(START), jnp.int32(0)) if self.dynamic else ()

    def up(self, loss: jax.Array, state: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the scaled loss."""
        return loss * state[0] if self.dynamic else loss

    def down(self, loss: jax.Array, state: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the unscaled loss."""
        return loss / state[0] if self.dynamic else loss

    def update(
        self,
        update: Callable[[Any, Any], Any],
        gradients: Any,
        arrays: tuple[Any, Any],
        state: tuple[jax.Array, ...],
    ) -> tuple[Any, tuple[jax.Array, ...]]:
        """Applies an update with unscaled gradients, if they are finite.

        Args:
          update: `(gradients, optimiser_state) -> (trained, optimiser_state)`.
          gradients: gradients of the scaled loss.
          arrays: `(trained, optimiser_state)`.
          state: state of the scale.

        Returns:
          `((trained, optimiser_state), state)`.
        """
        if not self.dynamic:
            return update(gradients, arrays[1]), state
        factor, good = state
        gradients = jax.tree.map(lambda x: x / factor, gradients)
        finite = jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(gradients)]))
        safe = jax.tree.map(lambda x: jnp.where(finite, x, 0), gradients)
        arrays = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), update(safe, arrays[1]), arrays
        )
        good = jnp.where(finite, good + 1, 0)
        grows = good == GROWTH_STEPS
        factor = jnp.where(finite, jnp.where(grows, 2 * factor, factor), factor / 2)
        return arrays, (jnp.clip(factor, 1.0, MOST), jnp.where(grows, 0, good))
