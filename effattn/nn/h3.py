"""H3 mixer: a shift state space and a diagonal one, with gates."""

from typing import Unpack

from effattn.arrays import checks, dtypes
from effattn.functional.h3 import h3_mixing
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.short_convolution import convolved
from effattn.nn.state_space import Modes, complex_of


class H3(Modes):
    """Mixer with a shift and a diagonal state space (Fu et al. 2022, "Hungry Hungry Hippos").

        q, k, v = x W_q, x W_k, x W_v;   k = shift(k)
        y = h3_mixing(q, k, v, A, C, dt, d) W_o

    The shift state space is a causal convolution of the keys with `shift_size` taps per feature,
    since its matrix only shifts the last inputs. A starts as in `S4D`, and each head has its own A,
    C, dt and d. Whole sequences are computed as a convolution; packed sequences and decoding are
    computed as a recurrence. The decode state has D H `state_size` numbers per row for heads of H
    features.

    Args:
      head_dim: H, size of a head, a divisor of D; default 1. There are D / H heads, whatever the
        number of heads of the model.
      state_size: number of modes per head, conjugates included; even.
      shift_size: number of tokens that the shift state space reads.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "h3"

    def __init__(
        self,
        in_features: int,
        *,
        head_dim: int | None = None,
        state_size: int = 64,
        shift_size: int = 4,
        **options: Unpack[Projected],
    ):
        size = checks.at_least("head_dim", 1 if head_dim is None else head_dim, 1, "features")
        if checks.at_least("in_features", in_features, 1, "features") % size:
            raise ValueError(f"in_features ({in_features}) must be a multiple of head_dim ({size})")
        super().__init__(in_features, in_features // size, state_size=state_size, **options)
        width = checks.at_least("shift_size", shift_size, 1, "tokens")
        make = Layers(**options)
        self.query, self.key, self.value = (make.linear(in_features, in_features) for _ in range(3))
        self.shift = make.convolution(in_features, width, activation=None)
        self.output = self._outputs(make)
        self.out = make.out(in_features, in_features)

    def _mix(self, x, state, lengths, segment_ids):
        states, last = (None, None) if state is None else state
        key = self.key(x)
        if last is None:
            last = self.shift.init_state(len(x), x.dtype)
        key, last = convolved(self.shift, key, last, lengths, segment_ids)
        wide = dtypes.wide(key.dtype)
        y, states = h3_mixing(
            self.query(x),
            key,
            self.value(x),
            rate=self._A(wide),
            output=complex_of(self.output, wide),
            step_size=self._dt(wide),
            skip=self.skip[...].astype(wide),
            lengths=lengths,
            segment_ids=segment_ids,
            initial_state=states,
            return_state=True,
        )
        return self.out(y), (states, last)
