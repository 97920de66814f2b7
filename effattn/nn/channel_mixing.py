"""Channel mixings of RWKV: feed-forward layers that also read the token before each token."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.decode.state import state_dtype
from effattn.nn import initializers
from effattn.nn.layers import Layers
from effattn.nn.module import Module
from effattn.nn.options import Parameters
from effattn.nn.placement import axes
from effattn.nn.token_shift import check_depth, mixed_with_previous, token_shift


class ChannelMixing(Module):
    """Base class of the channel mixings: token shift, squared ReLU and, in some, a gate.

    The module has a decode state, the last token.

    Args:
      hidden_features: size of k; for the default see each class.
      depth: relative depth of the layer, 0 (first) to 1 (last); sets the token shift.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of W_v; default None, `kernel_init`.
      **options: see `effattn.nn.options.Parameters`.
    """

    receptance: Any  # None without a gate

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        *,
        depth: float = 0.5,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        **options: Unpack[Parameters],
    ):
        check_depth(depth)
        self.in_features = checks.at_least("in_features", in_features, 1, "features")
        if hidden_features is None:
            hidden_features = self._default_hidden(in_features)
        hidden = checks.at_least("hidden_features", hidden_features, 1, "features")
        make = Layers(kernel_init=kernel_init, out_kernel_init=out_kernel_init, **options)
        self.dtype, self.param_dtype = options.get("dtype"), make.param_dtype
        amounts = self._amounts(np.arange(in_features) / in_features, depth)
        gated = len(amounts) > 1
        self.receptance = make.linear(in_features, in_features) if gated else None
        self.key = make.hidden(in_features, hidden)
        self.value = make.out(hidden, in_features, kernel_metadata=axes("hidden", "features"))
        self.shifts = make.constant(amounts)

    @staticmethod
    def _default_hidden(features: int) -> int:
        """The size of k for D features."""
        return 4 * features

    @staticmethod
    def _amounts(places: np.ndarray, depth: float) -> list[np.ndarray]:
        """The initial amounts of the token shift: those of the gate, if there is one, and of k.

        Args:
          places: `(D,)`, the place of each feature in [0, 1).
          depth: relative depth of the layer.
        """
        raise NotImplementedError

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
        *of_gate, of_key = self._shifted(x.astype(dtype), shifted.astype(dtype), amounts)
        y = self.value(jnp.square(jax.nn.relu(self.key(of_key))))
        if self.receptance is not None:
            y = jax.nn.sigmoid(self.receptance(of_gate[0])) * y
        return y, last

    def _shifted(self, x, shifted, amounts):
        """The inputs `(C, B, T, D)`, between each token and the token before it."""
        return x[None] + (shifted - x)[None] * amounts


class RWKV4ChannelMix(ChannelMixing):
    """Channel mixing of RWKV-4 (Peng et al. 2023), a replacement of the feed-forward layer.

        k, r = (mu_c x + (1 - mu_c) x') W_c;   y = sigmoid(r) (relu(k)^2 W_v)

    x' is the previous token, so the module has a decode state: the last token. k has 4 D
    features by default. Arguments are those of `effattn.nn.channel_mixing.ChannelMixing`.
    """

    @staticmethod
    def _amounts(places: np.ndarray, depth: float) -> list[np.ndarray]:
        return [places ** (1 - depth)] * 2

    def _shifted(self, x, shifted, amounts):
        return mixed_with_previous(x, shifted, amounts)


class RWKV6ChannelMix(ChannelMixing):
    """Channel mixing of RWKV-6 (Peng et al. 2024, "Eagle and Finch"), with a receptance gate.

        k, r = (x + (x' - x) mu_c) W_c;   y = sigmoid(r) (relu(k)^2 W_v)

    x' is the previous token, so the module has a decode state: the last token. k has 3.5
    D features by default, rounded up to a multiple of 8. Arguments are those of
    `effattn.nn.channel_mixing.ChannelMixing`.
    """

    @staticmethod
    def _default_hidden(features: int) -> int:
        return -(-7 * features // 16) * 8

    @staticmethod
    def _amounts(places: np.ndarray, depth: float) -> list[np.ndarray]:
        return [1 - places ** (1 - depth)] * 2


class RWKV7ChannelMix(ChannelMixing):
    """Channel mixing of RWKV-7 (Peng et al. 2025, "RWKV-7 Goose"), without a gate.

        k = (x + (x' - x) mu) W_k;   y = relu(k)^2 W_v

    x' is the previous token, so the module has a decode state: the last token. k has 4 D
    features by default. Arguments are those of `effattn.nn.channel_mixing.ChannelMixing`.
    """

    @staticmethod
    def _amounts(places: np.ndarray, depth: float) -> list[np.ndarray]:
        return [1 - places ** ((1 - depth) ** 4)]
