"""Base classes of mixers with diagonal state spaces, as in S4: one space per feature or head."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.functional.s4 import hippo
from effattn.nn import activations
from effattn.nn.initializers import log_step_init
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.recurrent import RecurrentMixer


class Modes(RecurrentMixer):
    """Base class of mixers with diagonal state spaces that start as HiPPO-LegS.

    `log_rate` is log(-A_real), `turn` is A_imag, `log_step` is log(dt), and `skip` is D of the
    papers. A complex parameter is stored as a real array whose first axis has the real and the
    imaginary part.
    """

    _of_known_length = True

    def __init__(
        self, in_features: int, spaces: int, *, state_size: int, **options: Unpack[Projected]
    ):
        super().__init__(in_features, **options)
        if checks.at_least("state_size", state_size, 2, "modes") % 2:
            raise ValueError(f"state_size must be even, as modes come in pairs, got {state_size}")
        L, _, _ = hippo(state_size)
        make, shape = Layers(**options), (spaces, state_size // 2)
        self.log_rate = make.constant(np.full(shape, np.log(-L.real)))
        self.turn = make.constant(np.broadcast_to(L.imag, shape))
        self.log_step = make.drawn(log_step_init, spaces)
        self.skip = make.drawn(jax.random.normal, spaces)

    def _outputs(self, make: Layers) -> nnx.Param:
        """C of diagonal spaces: B C of S4, where the numbers of C are normal with variance 1."""
        spaces, modes = self.log_rate.shape
        _, _, B = hippo(2 * modes)
        output = make.drawn(nnx.initializers.normal(0.5**0.5), 2, spaces, modes)
        product = B * complex_of(output, dtypes.wide(self.param_dtype))
        output[...] = jnp.stack([product.real, product.imag]).astype(self.param_dtype)
        return output

    def _A(self, wide: Any) -> jax.Array:
        return lax.complex(-jnp.exp(self.log_rate[...].astype(wide)), self.turn[...].astype(wide))

    def _dt(self, wide: Any) -> jax.Array:
        return jnp.exp(self.log_step[...].astype(wide))


class StateSpace(Modes):
    """Base class of `S4` and `S4D`: y = glu(gelu_tanh(state_space(x)) W), one space per feature.

    `output` is C (S4D) or C~ (S4).
    """

    def __init__(self, in_features: int, *, state_size: int, **options: Unpack[Projected]):
        super().__init__(in_features, in_features, state_size=state_size, **options)
        self.out = Layers(**options).out(in_features, 2 * in_features)

    def _pairs(self, array: np.ndarray) -> nnx.Param:
        """Parameter from a complex array `(M,)`, repeated for all features."""
        both = np.stack([array.real, array.imag])[:, None]
        shape = (2, self.in_features, len(array))
        return nnx.Param(jnp.broadcast_to(jnp.asarray(both, self.param_dtype), shape))

    def _finish(self, y: jax.Array) -> jax.Array:
        return jax.nn.glu(self.out(activations.gelu_tanh(y)))


def complex_of(pairs: Any, wide: Any) -> jax.Array:
    """Complex array from a parameter with real and imaginary part along the first axis."""
    real, imaginary = pairs[...].astype(wide)
    return lax.complex(real, imaginary)
