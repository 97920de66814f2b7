"""Self-attention of layers that share keys and values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.cores import sequence_parts
from effattn.decode.contiguous import ContiguousState
from effattn.decode.state import is_concrete, new_lengths
from effattn.decode.tokens import TokenState
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention

Keys = tuple[jax.Array, jax.Array]

_DECODER = "effattn.decode.contiguous:ContiguousDecoder"


class SharedKeysAttention(SelfAttention):
    """Self-attention that shares its keys and values with other layers, or reads those of another.

        q = rotary(x Wq);   y = attention(q, k, v) Wo
        k, v = rotary(x Wk), x Wv    with `has_keys`, else those of another layer

    Models make this mixer for layers that share by `TransformerConfig.keys_from`. The decode state
    of a layer with keys is a KV cache, and a layer without keys reads that cache. The mechanism
    must have a cache of all tokens and no parameters of its own: "softmax", "sigmoid",
    "squared_relu", "stick_breaking" or "entmax".

    Args:
      has_keys: whether the layer projects keys and values.
      **options: as in `SelfAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        attention: str = "softmax",
        *,
        has_keys: bool = True,
        **options: SelfAttentionOptions,
    ):
        super().__init__(in_features, num_heads, attention, **options)
        able = [name for name in registry.names("causal") if _shares(registry.get(name))]
        if not self.binding.registered or self.binding.name not in able:
            raise ValueError(
                f"layers that share keys and values must have a mechanism among {', '.join(able)}, "
                f"got {self.binding.name!r}"
            )
        self.has_keys = checks.flag("has_keys", has_keys)
        if not has_keys:
            del self.key, self.value, self.key_norm

    @mesh_axes.on_mesh_of_input
    def with_shared(
        self,
        x: jax.Array,
        shared: Keys | None = None,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> tuple[jax.Array, Keys]:
        """Returns the output of a call, and the keys `(B, T, K, H)` and values `(B, T, K, Hv)`.

        `shared` are the keys and values of another layer, for a layer without keys. Other arguments
        are as in `SelfAttention`.
        """
        sequence_parts.check_mixer(self)
        self._check_shared(shared)
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        query, key, value = self._heads_and_keys(x, positions, shared)
        if key.shape[:2] != x.shape[:2]:
            raise ValueError(
                f"shared must be keys and values of the tokens of x, {x.shape[:2]}, got "
                f"{key.shape[:2]}; pass those that the layer with keys returned for x"
            )
        out = self._attend((query, key, value), **keywords, **self._dropout(rngs))
        return self.out(out), (key, value)

    def extend_with_shared(
        self,
        x: jax.Array,
        state: Any,
        shared: ContiguousState | None = None,
        *,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, None]:
        """Mixes T >= 1 new tokens with the tokens that were read before.

        `shared`, for a layer without keys, is the state of the layer with keys after these tokens.
        Other arguments are as in `SelfAttention.extend`.

        Returns:
          `(y (B, T, D), state, None)`: keys and values are shared by the state.
        """
        self._check_shared(shared)
        y, state = self._extended(x, state, lengths, shared)
        return y, state, None

    def _check_shared(self, shared):
        if self.has_keys and shared is not None:
            raise ValueError(
                "shared must be None in a layer with has_keys=True, which has keys and values of "
                "its own; leave it out"
            )

    def _extend(self, x, state, lengths, shared=None):
        if self.has_keys:
            return super()._extend(x, state, lengths)
        if not isinstance(shared, ContiguousState):
            raise ValueError(
                "shared must be the ContiguousState that the layer with keys returned for these "
                f"tokens, got {type(shared).__name__}"
            )
        keys = shared.key, shared.value
        query, *given = self._heads_and_keys(x, self._positions(x, state), keys)
        lengths = new_lengths(lengths, *x.shape[:2])
        after = state.length + lengths
        if is_concrete(shared.length, after) and np.any(shared.length != after):
            raise ValueError(
                "shared must be the state of the layer with keys after the same tokens, "
                f"{np.asarray(after).tolist()} a row, got {np.asarray(shared.length).tolist()}; "
                "extend that layer first"
            )
        given = [array.astype(query.dtype) for array in given]
        out = self._decoder().attend(query, *given, state.length, lengths)
        return self.out(out), dataclasses.replace(state, length=after)

    def _empty(self, batch, max_length, dtype):
        if self.has_keys:
            return super()._empty(batch, max_length, dtype)
        return TokenState((), jnp.zeros((batch,), jnp.int32))

    def _heads_and_keys(self, x, positions, keys):
        """Query, key and value; with `has_keys`, those of x."""
        if self.has_keys or keys is None:
            return self._heads(x, positions)
        if not isinstance(keys, tuple) or len(keys) != 2:
            raise ValueError(
                "shared must be the keys and values that with_shared of a layer with keys "
                f"returned, got {type(keys).__name__}"
            )
        for name, array, size in zip(
            ("keys", "values"), keys, (self.head_dim, self.value_dim), strict=True
        ):
            if np.shape(array)[2:] != (self.num_kv_heads, size):
                raise ValueError(
                    f"{name} of another layer must have {self.num_kv_heads} heads of size {size}, "
                    f"as this layer has, got {np.shape(array)[2:]}; give both layers the same "
                    "options"
                )
        query = self._project_queries(x)
        if self.rotary is not None and positions is not None:
            query = self.rotary(query, positions)
        return query, *keys

    def _project_keys(self, *args: Any, **given: Any) -> Keys:
        if not self.has_keys:
            raise ValueError(
                "shared must be given to a layer that reads the keys and values of another layer; "
                "call the whole model, or pass what with_shared of that layer returned"
            )
        return super()._project_keys(*args, **given)


def _shares(mechanism: registry.Mechanism) -> bool:
    """Returns whether the mechanism has a cache of all tokens, and no parameters of its own."""
    return mechanism.decoder == _DECODER and mechanism.mixer == "effattn.nn.SelfAttention"
