"""Base class of the S4 mixers: one state space per feature."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from effattn.arrays import checks
from effattn.functional.s4 import hippo
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.recurrent import RecurrentMixer


class StateSpace(RecurrentMixer):
    """Base class of `S4` and `S4D`: y = glu(gelu(state_space(x)) W), and the common parameters.

    `log_rate` is log(-A_real), `turn` is A_imag, `log_step` is log(dt), `output` is C (S4D) or C~
    (S4), and `skip` is D of the papers. A complex parameter is stored as a real array whose first
    axis has the real and the imaginary part.
    """

    _of_known_length = True

    def __init__(self, in_features: int, *, state_size: int, **options: Unpack[Projected]):
        super().__init__(in_features, **options)
        if checks.at_least("state_size", state_size, 2, "modes") % 2:
            raise ValueError(f"state_size must be even, as modes come in pairs, got {state_size}")
        L, _, _ = hippo(state_size)
        make, shape = Layers(**options), (in_features, state_size // 2)
        self.log_rate = make.constant(np.full(shape, np.log(-L.real)))
        self.turn = make.constant(np.broadcast_to(L.imag, shape))
        # dt is log-uniform in [0.001, 0.1].
        steps = jax.random.uniform(
            make.rngs.params(), (in_features,), make.param_dtype, np.log(0.001), np.log(0.1)
        )
        self.log_step = nnx.Param(steps)
        self.skip = make.drawn(jax.random.normal, in_features)
        self.out = make.out(in_features, 2 * in_features)

    def _pairs(self, array: np.ndarray) -> nnx.Param:
        """Parameter from a complex array `(M,)`, repeated for all features."""
        both = np.stack([array.real, array.imag])[:, None]
        shape = (2, self.in_features, len(array))
        return nnx.Param(jnp.broadcast_to(jnp.asarray(both, self.param_dtype), shape))

    def _A(self, wide: Any) -> jax.Array:
        return lax.complex(-jnp.exp(self.log_rate[...].astype(wide)), self.turn[...].astype(wide))

    def _dt(self, wide: Any) -> jax.Array:
        return jnp.exp(self.log_step[...].astype(wide))

    def _finish(self, y: jax.Array) -> jax.Array:
        return jax.nn.glu(self.out(jax.nn.gelu(y)))


def complex_of(pairs: Any, wide: Any) -> jax.Array:
    """Complex array from a parameter with real and imaginary part along the first axis."""
    real, imaginary = pairs[...].astype(wide)
    return lax.complex(real, imaginary)
