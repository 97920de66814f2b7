"""What mixers of tokens share that attend by no function of queries, keys and values."""

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
    """A mixer of whole sequences; a subclass says how it mixes.

    Args:
      in_features: D.
      mechanism: the registered name.
      is_causal: tokens see those before them alone.
      dropout_rate: only 0 where the mechanism has none.
      dtype: of the computation; default that of the input and the parameters together.
      param_dtype: of the parameters.
    """

    _of_known_length = False  # an exported program may not leave the number of tokens open

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
        """`(B, T, D)` of x `(B, T, D)`, which is zero in the padding."""
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
          segment_ids: `(B, T)` int; tokens are mixed within equal ids, 0 is padding.
          rngs: as other mixers take; nothing here is random.

        Returns:
          `(B, T, D)`. Nothing in the padding reaches the other tokens.
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
        """The dtype of the computation."""
        return dtypes.common(x, self.param_dtype) if self.dtype is None else self.dtype

    def _kept_in(self, dtype: Any) -> Any:
        """The dtype of what a state keeps of tokens themselves, where `init_state` is told none."""
        if dtype is not None:
            return dtype
        return self.param_dtype if self.dtype is None else self.dtype


class CausalMixer(Mixer):
    """A mixer that decodes; a subclass says what it keeps, and how it goes on from there."""

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> Any:
        """The state of `batch` rows that have seen nothing.

        Args:
          batch: B.
          max_length: the most tokens that a row may come to hold; no bound where the state does
            not grow, unless it keeps the last tokens and would have room for more than these.
          dtype: of what is kept of tokens themselves, a float of at least 16 bits; default the
            module's.
        """
        self._check_causal()
        dtype = check_init(batch, max_length, self._kept_in(dtype))
        return self._empty(batch, max_length, dtype)

    def _empty(self, batch: int, max_length: int, dtype: Any) -> Any:
        """The state, by a subclass."""
        raise NotImplementedError

    def _check_shapes(self, state: Any, batch: int) -> None:
        """`ValueError` if it is the state of a layer of other sizes."""
        capacity = self._capacity(state)
        empty = jax.eval_shape(lambda: self._empty(batch, capacity, self._kept_in(None)))
        got, needed = ([x.shape for x in jax.tree.leaves(s)] for s in (state, empty))
        if got != needed:
            raise ValueError(
                f"state has arrays of shapes {got}, and this {type(self).__name__} needs {needed}; "
                "it is the state of another layer"
            )

    def _capacity(self, state: Any) -> int:
        """How many tokens a row of the state may hold; any number where it does not grow."""
        return 1

    def _check_causal(self) -> None:
        if not self.is_causal:
            raise ValueError(
                f"a bidirectional {type(self).__name__} cannot decode; make it with is_causal=True"
            )

    def _extend(self, x: jax.Array, state: Any, lengths: jax.Array | None) -> tuple[jax.Array, Any]:
        """`(y, state)` of more tokens; `lengths`, if any, are checked, and the padding zero."""
        raise NotImplementedError

    def extend(
        self, x: jax.Array, state: Any, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Mixes T >= 1 more tokens, given all before them.

        Args:
          x: `(B, T, D)`.
          state: from `init_state` or an earlier call.
          lengths: `(B,)` int, how many of the T tokens each row has, right padded; default all.

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
        """`extend` by one token, x `(B, 1, D)`."""
        x = tokens_of("x", x, self.in_features)
        if x.shape[1] != 1:
            raise ValueError(f"step takes one token, x (B, 1, D), got x of shape {x.shape}")
        return self.extend(x, state)

    # What `extend` takes.
    _state: type[Any]
