"""S4D mixer: one diagonal state space per feature."""

from typing import Unpack

from effattn.arrays import dtypes
from effattn.functional.s4d import s4_convolution
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.state_space import StateSpace, complex_of


class S4D(StateSpace):
    """Mixer with diagonal state spaces (Gu et al. 2022, "On the Parameterization of S4D").

        y = glu(gelu(s4_convolution(x, A, C, dt, skip)) W)

    A starts as the modes of HiPPO-LegS (S4D-LegS). Whole sequences are computed as a convolution;
    packed sequences and decoding are computed as a recurrence. The decode state has `state_size`
    numbers per feature.

    Args:
      state_size: number of modes per feature, conjugates included; even.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "s4d"

    def __init__(
        self,
        in_features: int,
        *,
        state_size: int = 64,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, state_size=state_size, **options)
        self.output = self._outputs(Layers(**options))

    def _mix(self, x, state, lengths, segment_ids):
        x = x.astype(self._computed_in(x))
        wide = dtypes.wide(x.dtype)
        y, state = s4_convolution(
            x,
            rate=self._A(wide),
            output=complex_of(self.output, wide),
            step_size=self._dt(wide),
            skip=self.skip[...].astype(wide),
            lengths=lengths,
            segment_ids=segment_ids,
            initial_state=state,
            return_state=True,
        )
        return self._finish(y), state
