"""S5 mixer: one diagonal state space for all features."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.functional.s4 import hippo_modes
from effattn.functional.s5 import s5_scan
from effattn.nn import activations
from effattn.nn.initializers import log_step_init
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.state_space import complex_of


class S5(RecurrentMixer):
    """Mixer with one state space of many inputs and outputs (Smith et al. 2022, "Simplified ...").

        g = gelu_tanh(s5_scan(x, A, B, C, dt, skip));   y = g * sigmoid(g W)

    A starts as J blocks of the normal part of HiPPO-LegS (HiPPO-N), and B and C as LeCun normal
    matrices in its modes. With `is_causal=False` the same recurrence also runs from the last token
    to the first, with a second C. The decode state has `state_size` numbers per row.

    Args:
      state_size: size of the state, conjugate modes included; a multiple of twice `num_blocks`.
        Default D, rounded up.
      num_blocks: J, number of HiPPO-N blocks at the start.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "s5"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        *,
        state_size: int | None = None,
        num_blocks: int = 1,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        blocks = checks.at_least("num_blocks", num_blocks, 1, "blocks")
        if state_size is None:
            state_size = -(-in_features // (2 * blocks)) * 2 * blocks
        if checks.at_least("state_size", state_size, 2, "modes") % (2 * blocks):
            raise ValueError(
                f"state_size must be a multiple of {2 * blocks}, as each of {blocks} blocks has "
                f"pairs of modes, got {state_size}"
            )
        make = Layers(**options)
        rates, to_modes = hippo_modes(state_size // blocks)
        rates = np.tile(rates, blocks)
        self.log_rate = make.constant(np.log(-rates.real))
        self.turn = make.constant(rates.imag)
        self.log_step = make.drawn(log_step_init, *rates.shape)
        lecun, size = nnx.initializers.lecun_normal(), (in_features, state_size)

        def drawn(*shape):
            return lecun(make.rngs.params(), shape, dtypes.wide(make.param_dtype))

        self.input = self._pairs(_in_modes(to_modes, drawn(*size).T))
        outputs = [
            _in_modes(to_modes.conj(), drawn(*size[::-1])).T
            for _ in range(1 if self.is_causal else 2)
        ]
        self.output = self._pairs(outputs[0] if self.is_causal else jnp.stack(outputs))
        self.skip = make.drawn(jax.random.normal, in_features)
        self.gate = make.out(in_features, in_features)

    def _pairs(self, array):
        return nnx.Param(jnp.stack([array.real, array.imag]).astype(self.param_dtype))

    def _mix(self, x, state, lengths, segment_ids):
        x = x.astype(self._computed_in(x))
        wide = dtypes.wide(x.dtype)
        rate = -jnp.exp(self.log_rate[...].astype(wide))
        result: Any = s5_scan(
            x,
            rate=lax.complex(rate, self.turn[...].astype(wide)),
            input=complex_of(self.input, wide),
            output=complex_of(self.output, wide),
            step_size=jnp.exp(self.log_step[...].astype(wide)),
            skip=self.skip[...].astype(wide),
            is_causal=self.is_causal,
            lengths=lengths,
            segment_ids=segment_ids,
            initial_state=state,
            return_state=self.is_causal,
        )
        y, state = result if self.is_causal else (result, None)
        y = activations.gelu_tanh(y)
        return y * jax.nn.sigmoid(self.gate(y)), state


def _in_modes(to_modes: np.ndarray, matrix: jax.Array) -> jax.Array:
    """The products of `to_modes (M, S)` and each block of S rows of a matrix `(J S, D)`."""
    blocks = matrix.reshape(-1, to_modes.shape[1], matrix.shape[1])
    product = jnp.einsum(
        "ms,jsd->jmd", jnp.asarray(to_modes, dtypes.common(matrix, jnp.complex64)), blocks
    )
    return product.reshape(-1, matrix.shape[1])
