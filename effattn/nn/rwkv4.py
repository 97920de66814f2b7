"""Mixer with the time mixing of RWKV-4."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import dtypes
from effattn.functional.rwkv4 import rwkv4_mixing
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.token_shift import check_depth, mixed_with_previous, token_shift


class RWKV4(RecurrentMixer):
    """Time mixing of RWKV-4 (Peng et al. 2023, "RWKV: Reinventing RNNs", section 3.1).

    x' is the previous token; each of the three inputs has one amount mu per feature:

        r, k, v = (mu_c x + (1 - mu_c) x') W_c
        y = (sigmoid(r) rwkv4_mixing(k, v, exp(w), u)) W_o

    Time is O(T D^2); the decode state has 4 D numbers per row.

    Args:
      depth: relative depth of the layer, 0 (first) to 1 (last); sets initial parameters.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "rwkv4"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        *,
        depth: float = 0.5,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        check_depth(depth)
        make, features = Layers(**options), self.in_features
        self.receptance, self.key, self.value = (make.linear(features, features) for _ in range(3))
        self.out = make.out(features, features)
        # Initial values of the authors' code; amounts grow less steeply in later layers.
        place = np.arange(features) / features
        mixed = place ** (1 - depth)
        self.shifts = make.constant([place ** ((1 - depth) / 2), mixed, mixed + 0.3 * depth])
        along = np.arange(features) / max(features - 1, 1)
        self.log_decay = make.constant(-5 + 8 * along ** (0.7 + 1.3 * depth))
        self.bonus = make.constant(np.log(0.3) + 0.5 * ((np.arange(features) + 1) % 3 - 1))

    def _mix(self, x, state, lengths, segment_ids):
        sums, before = (None, None) if state is None else state
        dtype = self._computed_in(x)
        shifted, last = token_shift(x, before, lengths=lengths, segment_ids=segment_ids)
        amounts = self.shifts[...].astype(dtype)[:, None, None]
        of_receptance, of_key, of_value = mixed_with_previous(x.astype(dtype), shifted, amounts)
        wide = dtypes.wide(dtype)
        average, sums = rwkv4_mixing(
            self.key(of_key),
            self.value(of_value),
            decay=jnp.exp(self.log_decay[...].astype(wide)),
            bonus=self.bonus[...].astype(wide),
            lengths=lengths,
            segment_ids=segment_ids,
            initial_state=sums,
            return_state=True,
        )
        gate = jax.nn.sigmoid(self.receptance(of_receptance))
        return self.out(gate * average), (sums, last)
