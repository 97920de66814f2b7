"""Base classes of the mixers of the attention-free transformer (AFT)."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import dtypes
from effattn.arrays.segments import within
from effattn.functional.attention_free import attention_free, biased_average, check_bias
from effattn.nn.cached import CachedMixer
from effattn.nn.layers import Layers
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import Projected

# As in the paper, section 4.
bias_init = nnx.initializers.normal(0.01)


class AFT(CausalMixer):
    """Base class of the AFT mixers: y = attention_free(x W_q, x W_k, x W_v, w) W_o."""

    _of_known_length = True

    def __init__(self, in_features: int, **options: Unpack[Projected]):
        super().__init__(in_features, **options)
        make = Layers(**options)
        self.query, self.key, self.value = (make.linear(in_features, in_features) for _ in range(3))
        self.out = make.out(in_features, in_features)


class BiasedAFT(AFT, CachedMixer):
    """Base class of AFT mixers with a bias per pair of positions.

    The decode state caches all keys and values. A step costs O(S D); many tokens at once, such as a
    prompt, cost as much as a whole sequence of S tokens.
    """

    window: int | None = None

    def _bias(self) -> Any:
        """The `position_bias` argument of `attention_free`."""
        raise NotImplementedError

    def _bias_at(self, position: jax.Array, capacity: int) -> jax.Array:
        """Biases `(B, S, 1 or D)` of the queries at `position (B,)` over all cache slots."""
        raise NotImplementedError

    def _mix_all(self, x, lengths, segment_ids):
        y = attention_free(
            *(project(x) for project in (self.query, self.key, self.value)),
            position_bias=self._bias(),
            local_window_size=self.window,
            is_causal=self.is_causal,
            lengths=lengths,
            segment_ids=segment_ids,
        )
        return self.out(y)

    def _prepare(self, x, positions):
        return (self.key(x), self.value(x)), self.query(x)

    def _mix_at(self, tokens, own, positions):
        dtype = own.dtype
        key, value = (x.astype(dtypes.wide(dtype)) for x in tokens)
        capacity, features = key.shape[1:]

        def of_token(at):
            """Average `(B, D)` of one token per row; the weights are `(B, S, D)`."""
            seen = within(at + 1, capacity)[..., None]
            bias = self._bias_at(at, capacity).astype(key.dtype)
            exponent = jnp.where(seen, key + bias, dtypes.lowest(key.dtype))
            weights = jax.nn.softmax(exponent, 1)
            return (weights * value).sum(1)

        # The form for whole sequences computes all pairs, at several times less cost per pair.
        few = capacity // 8 if self.window is None else 2 * (self.window + 1)
        if isinstance(positions.shape[1], int) and positions.shape[1] <= few:
            average = jnp.moveaxis(lax.map(of_token, positions.T), 0, 1)
        else:
            bias = check_bias(self._bias(), self.window, True, capacity, features, key.dtype)
            whole = biased_average(key, value, None, bias, self.window, True)
            average = jnp.take_along_axis(whole, positions[..., None], 1, mode="clip")
        return self.out((jax.nn.sigmoid(own.astype(key.dtype)) * average).astype(dtype))
