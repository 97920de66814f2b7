"""RWKV-4: time mixing (a mixer) and channel mixing (a feed-forward layer)."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.decode.state import state_dtype
from effattn.functional.rwkv4 import rwkv4_mixing
from effattn.nn import initializers
from effattn.nn.layers import Layers
from effattn.nn.module import Module
from effattn.nn.options import Parameters, Projected
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.token_shift import check_depth, token_shift


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
        of_receptance, of_key, of_value = mixed_with_last(x.astype(dtype), shifted, amounts)
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


class RWKV4ChannelMix(Module):
    """Channel mixing of RWKV-4 (Peng et al. 2023), a replacement of the feed-forward layer.

        k, r = (mu_c x + (1 - mu_c) x') W_c;   y = sigmoid(r) (relu(k)^2 W_v)

    x' is the previous token, so the module has a decode state: the last token.

    Args:
      hidden_features: size of k; default 4 D.
      depth: as in `RWKV4`.
      kernel_init: initializer of the projections.
      **options: see `effattn.nn.options.Parameters`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        *,
        depth: float = 0.5,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        **options: Unpack[Parameters],
    ):
        check_depth(depth)
        self.in_features = checks.at_least("in_features", in_features, 1, "features")
        hidden = 4 * in_features if hidden_features is None else hidden_features
        hidden = checks.at_least("hidden_features", hidden, 1, "features")
        make = Layers(kernel_init=kernel_init, **options)
        self.dtype, self.param_dtype = options.get("dtype"), make.param_dtype
        self.receptance = make.linear(in_features, in_features)
        self.key = make.linear(in_features, hidden)
        self.value = make.linear(hidden, in_features)
        amounts = (np.arange(in_features) / in_features) ** (1 - depth)
        self.shifts = make.constant([amounts, amounts])

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Maps x `(B, T, D)` to `(B, T, D)`; the first token of a document follows zeros."""
        return self._mix(x, None, lengths, segment_ids)[0]

    def init_state(self, batch: int, dtype: Any = None) -> jax.Array:
        """Returns the empty decode state, zeros `(B, D)`."""
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        return jnp.zeros((batch, self.in_features), state_dtype(dtype))

    def extend(
        self, x: jax.Array, state: jax.Array, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `(y, state)` for T new tokens; `lengths[b]` tokens of row b are valid."""
        return self._mix(x, state, lengths, None)

    def _mix(self, x, before, lengths, segment_ids):
        dtype = dtypes.common(x, self.param_dtype) if self.dtype is None else self.dtype
        shifted, last = token_shift(x, before, lengths=lengths, segment_ids=segment_ids)
        amounts = self.shifts[...].astype(dtype)[:, None, None]
        of_receptance, of_key = mixed_with_last(x.astype(dtype), shifted, amounts)
        hidden = jnp.square(jax.nn.relu(self.key(of_key)))
        return jax.nn.sigmoid(self.receptance(of_receptance)) * self.value(hidden), last


def mixed_with_last(x: jax.Array, shifted: jax.Array, amounts: jax.Array) -> jax.Array:
    """Interpolates `amounts * x + (1 - amounts) * shifted` for C inputs; `(C, B, T, D)`."""
    shifted = shifted.astype(x.dtype)
    return amounts * x[None] + (1 - amounts) * shifted[None]
