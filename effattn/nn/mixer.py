"""Base classes of mixers without a function of query, key and value."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import within
from effattn.decode.state import check_init, check_state, new_lengths
from effattn.nn.binding import Binding
from effattn.nn.module import Module
from effattn.nn.tokens import padding_of, tokens_of, zero_padding


class Mixer(Module):
    """Base class of mixers of whole sequences; a subclass implements `_mix_all`.

    Args:
      in_features: D, number of features per token.
      mechanism: registered name of the mechanism.
      is_causal: token t reads tokens 0 to t only.
      dropout_rate: must be 0 if the mechanism has no dropout.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
    """

    _of_known_length = False  # True if T must be static, so symbolic lengths in export raise

    def __init__(
        self,
        in_features: int,
        mechanism: str,
        *,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        binding = Binding.of(mechanism)
        binding.require("causal" if is_causal else "bidirectional", f"is_causal={is_causal}")
        if dropout_rate:
            binding.require("dropout", f"dropout_rate={dropout_rate}")
        self.in_features = checks.at_least("in_features", in_features, 1, "features")
        self.binding: Binding = binding
        self.is_causal = is_causal
        self.dtype = dtype
        self.param_dtype = param_dtype

    def _mix_all(
        self, x: jax.Array, lengths: jax.Array | None, segment_ids: jax.Array | None
    ) -> jax.Array:
        """Mixes x `(B, T, D)`, zero in the padding; returns `(B, T, D)`."""
        raise NotImplementedError

    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences.

        Args:
          x: `(B, T, D)`.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, packed sequences: tokens mix within equal ids, 0 is padding.
          rngs: unused; every mixer accepts `rngs`.

        Returns:
          `(B, T, D)`. Valid tokens do not depend on the padding.
        """
        x = tokens_of("x", x, self.in_features)
        if self._of_known_length:
            checks.known_length(f"the mixer {self.binding.name!r}", x, axis=-2)

        def mix(mixer, x, lengths, segment_ids):
            batch, time = x.shape[:2]
            _, valid = padding_of(mixer.binding, batch, time, lengths, segment_ids)
            return mixer._mix_all(zero_padding(x, valid), lengths, segment_ids)

        return mesh_axes.placed_like(x, mix, self, x, lengths, segment_ids)

    def _computed_in(self, x: jax.Array) -> Any:
        """Computation dtype."""
        return dtypes.common(x, self.param_dtype) if self.dtype is None else self.dtype

    def _kept_in(self, dtype: Any) -> Any:
        """Dtype of cached token features: `dtype`, or the module's dtype if `dtype` is None."""
        if dtype is not None:
            return dtype
        return self.param_dtype if self.dtype is None else self.dtype


class CausalMixer(Mixer):
    """Base class of mixers that decode; a subclass implements `_empty` and `_extend`."""

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> Any:
        """Returns the empty decode state of `batch` rows.

        Args:
          batch: B, number of rows.
          max_length: maximum number of tokens per row. A state of constant size has no such limit.
            A mechanism that caches only the last tokens is limited to `max_length` if `max_length`
            is below the size of its cache.
          dtype: dtype of cached token features, a float of at least 16 bits; default the module's
            `dtype`, or `param_dtype` if `dtype` is None.
        """
        self._check_causal()
        dtype = check_init(batch, max_length, self._kept_in(dtype))
        return self._empty(batch, max_length, dtype)

    def _empty(self, batch: int, max_length: int, dtype: Any) -> Any:
        """Returns the empty state; implemented by subclasses."""
        raise NotImplementedError

    def _check_shapes(self, state: Any, batch: int) -> None:
        """Raises `ValueError` if `state` belongs to a layer of other sizes."""
        capacity = self._capacity(state)
        empty = jax.eval_shape(lambda: self._empty(batch, capacity, self._kept_in(None)))
        got, needed = ([x.shape for x in jax.tree.leaves(s)] for s in (state, empty))
        if got != needed:
            raise ValueError(
                f"state has arrays of shapes {got}, and this {type(self).__name__} needs {needed}; "
                "it is the state of another layer"
            )

    def _capacity(self, state: Any) -> int:
        """Maximum number of tokens per row; an arbitrary number for a state of constant size."""
        return 1

    def _check_causal(self) -> None:
        if not self.is_causal:
            raise ValueError(
                f"a bidirectional {type(self).__name__} cannot decode; make it with is_causal=True"
            )

    def _extend(self, x: jax.Array, state: Any, lengths: jax.Array | None) -> tuple[jax.Array, Any]:
        """Returns `(y, state)` for new tokens; `lengths` are checked, and padding in x is zero."""
        raise NotImplementedError

    def extend(
        self, x: jax.Array, state: Any, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Mixes T >= 1 new tokens with the tokens already read into `state`.

        Args:
          x: `(B, T, D)`.
          state: decode state, from `init_state` or an earlier call.
          lengths: `(B,)` int, valid tokens among the T of each right-padded row; default T.

        Returns:
          `(y (B, T, D), state)`.
        """
        x = tokens_of("x", x, self.in_features)
        batch, time = x.shape[:2]
        self._check_causal()
        check_state(state, self._state, batch)
        self._check_shapes(state, batch)

        def extend(mixer, x, state, lengths):
            each = new_lengths(lengths, batch, time)
            if lengths is not None:
                lengths, x = each, zero_padding(x, within(each, time))
            return mixer._extend(x, state, lengths)

        return mesh_axes.extended(extend, self, x, state, lengths)

    def step(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Calls `extend` with one token per row, x `(B, 1, D)`."""
        x = tokens_of("x", x, self.in_features)
        if x.shape[1] != 1:
            raise ValueError(f"step takes one token, x (B, 1, D), got x of shape {x.shape}")
        return self.extend(x, state)

    # The type of state that `extend` accepts.
    _state: type[Any]
