"""Base classes of mixers: modules from tokens to tokens, and the decode protocol."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import within
from effattn.cores import sequence_parts
from effattn.decode.hierarchical import HierarchicalState
from effattn.decode.rewind import (
    RewindableState,
    extend_rewindable,
    refuse_with_rewind,
    rewind,
    rewindable,
)
from effattn.decode.state import bound_of, check_init, check_state, new_lengths
from effattn.nn.binding import Binding
from effattn.nn.module import Module
from effattn.nn.tokens import padding_of, tokens_of, zero_padding

# Larger than every segment or block size in a decode state.
_MANY_TOKENS = 2**20


class Mixer(Module):
    """Base class of mixers of whole sequences; a subclass implements `_mix_all`.

    Args:
      in_features: D, number of features per token.
      is_causal, dropout_rate, dtype, param_dtype: see `effattn.nn.options`. Other options are for
        the layers of the subclass.
    """

    _mechanism: str  # registered name
    _of_known_length = False  # True if T must be static, so symbolic lengths in export raise
    # True if the attribute max_length is the number of positions with parameters.
    _limited = False
    max_length: int

    def __init__(
        self,
        in_features: int,
        *,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        **_: Any,
    ):
        binding = Binding.of(self._mechanism)
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
        """Mixes whole sequences; arguments as in `SelfAttention`.

        Outputs are zero in the padding. There is no dropout, so `rngs` changes nothing.
        """
        sequence_parts.check_mixer(self)
        x = tokens_of("x", x, self.in_features)
        if self._of_known_length:
            checks.known_length(f"the mixer {self.binding.name!r}", x, axis=-2)
        self._check_limit("x has", sequence_parts.all_tokens(x.shape[1]))

        def mix(mixer, x, lengths, segment_ids):
            batch, time = x.shape[:2]
            _, valid = padding_of(mixer.binding, batch, time, lengths, segment_ids)
            y = mixer._mix_all(zero_padding(x, valid), lengths, segment_ids)
            return zero_padding(y, valid)

        return mesh_axes.placed_like(x, mix, self, x, lengths, segment_ids)

    def _check_limit(self, what: str, tokens: Any) -> None:
        if self._limited and tokens > self.max_length:
            raise ValueError(
                f"{what} {tokens} tokens, but this {type(self).__name__} has parameters for "
                f"max_length={self.max_length} positions; make it with a larger max_length"
            )

    def _computed_in(self, *arrays: Any) -> Any:
        """Computation dtype of the arrays."""
        return dtypes.common(*arrays, self.param_dtype) if self.dtype is None else self.dtype

    def _kept_in(self, dtype: Any) -> Any:
        """Dtype of cached token features: `dtype`, or the module's dtype if `dtype` is None."""
        if dtype is not None:
            return dtype
        return self.param_dtype if self.dtype is None else self.dtype


class CausalMixer(Mixer):
    """Base class of mixers that decode; a subclass implements `_empty` and `_extend`.

    The lengths that `_extend` gets are a NumPy array if the caller gave Python or NumPy integers.
    """

    def init_state(
        self, batch: int, max_length: int, dtype: Any = None, *, max_rewind: int = 0
    ) -> Any:
        """Returns the empty decode state of `batch` rows.

        Args:
          batch: B, number of rows.
          max_length: maximum number of tokens per row. A state of constant size has no such limit.
            A mechanism that caches only the last tokens is limited to `max_length` if `max_length`
            is below the size of its cache.
          dtype: dtype of cached token features, a float of at least 16 bits; default the module's
            `dtype`, or `param_dtype` if `dtype` is None.
          max_rewind: R, most tokens that `rewind` can forget; default 0, none. Unless the state is
            a cache with a place for each token, `extend` then reads the last R tokens again.
        """
        self._check_causal()
        own = [dtypes.common(x) for x in jax.tree.leaves(self)] if max_rewind else []
        own = [each for each in own if jnp.issubdtype(each, jnp.floating)]
        token = jax.ShapeDtypeStruct((batch, 1, self.in_features), dtypes.wide(jnp.float32, *own))
        return rewindable(self._initial(batch, max_length, dtype), max_rewind, token)

    def _initial(self, batch: int, max_length: int, dtype: Any) -> Any:
        """The empty state without `max_rewind`; arguments as in `init_state`."""
        dtype = check_init(batch, max_length, self._kept_in(dtype))
        self._check_limit("max_length asks for", max_length)
        state = self._empty(batch, max_length, dtype)
        # States of two recurrences may have the same shapes, and another meaning.
        if hasattr(state, "mechanism"):
            state = dataclasses.replace(state, mechanism=self.binding.name)
        return state

    def _empty(self, batch: int, max_length: int, dtype: Any) -> Any:
        """Returns the empty state; implemented by subclasses."""
        raise NotImplementedError

    def _check_state(self, state: Any, batch: int) -> None:
        """Raises `ValueError` unless this layer could have made `state`, for `batch` rows."""

        def empty(max_length):
            return jax.eval_shape(lambda: self._initial(batch, max_length, None))

        def shapes(state):
            return [np.shape(x) for x in jax.tree.leaves(state)]

        bound, got = bound_of(state), shapes(state)
        most = self.max_length if self._limited else 2 * _MANY_TOKENS
        # A cache of tokens has the capacity of the state as its second axis.
        slots = max((s[1] for s in got if len(s) > 1), default=0)
        like = empty(min(slots, most) if bound is None else bound)
        check_state(state, type(like), batch)
        owner, name = getattr(state, "mechanism", None), self.binding.name
        if owner not in (None, name):
            raise ValueError(
                f"state must be of the mechanism {name!r}, got {owner!r}; it is the state of "
                "another layer"
            )
        if owner is None and hasattr(like, "mechanism"):  # a state that no mixer made
            like = dataclasses.replace(like, mechanism=None)
        needed = shapes(like)
        if got != needed and bound is None:
            # Sizes that differ between capacities `most // 2` and `most` depend on the capacity.
            like, large = empty(most // 2), empty(most)
            if len(got) == len(jax.tree.leaves(like)):
                needed = [
                    tuple(g if a != b else a for g, a, b in zip(*sizes, strict=True))
                    if len(sizes[0]) == len(sizes[1])
                    else sizes[1]
                    for sizes in zip(got, shapes(like), shapes(large), strict=True)
                ]
        structures = {jax.tree.structure(x) for x in (state, like)}
        is_another = got != needed or len(structures) > 1
        # Hierarchical states of other capacities have other numbers of levels.
        has_levels = isinstance(state, HierarchicalState)
        if is_another and (len(got) == len(needed) or not has_levels):
            raise ValueError(
                f"state has arrays of shapes {got}, and this {type(self).__name__} needs {needed}; "
                "it is the state of another layer"
            )

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
          `(y (B, T, D), state)`; y is zero in the padding.
        """
        return self._extended(x, state, lengths)

    def _extended(
        self, x: jax.Array, state: Any, lengths: jax.Array | None, *more: Any, further: int = 0
    ) -> tuple[Any, ...]:
        """Checks the arguments of `extend` and calls `_extend`, to which it passes `more`.

        `further` is the number of results of `_extend` after `(y, state)`.
        """
        x = tokens_of("x", x, self.in_features)
        batch, time = x.shape[:2]
        self._check_causal()
        if isinstance(state, RewindableState):
            refuse_with_rewind("global_mask or shared values", *more, further or None)
            return extend_rewindable(self._extended, x, state, lengths)
        self._check_state(state, batch)

        def extend(mixer, x, state, lengths, *more):
            each = new_lengths(lengths, batch, time)
            if lengths is None:
                return mixer._extend(x, state, None, *more)
            valid = within(each, time)
            y, *rest = mixer._extend(zero_padding(x, valid), state, each, *more)
            return zero_padding(y, valid), *rest

        return mesh_axes.extended(extend, self, x, state, lengths, *more, further=further)

    def rewind(self, state: Any, n: int | jax.Array) -> Any:
        """Forgets the last n tokens of each row: see `effattn.decode.rewind`."""
        return rewind(state, n)

    def step(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Calls `extend` with one token per row, x `(B, 1, D)`."""
        x = tokens_of("x", x, self.in_features)
        if x.shape[1] != 1:
            raise ValueError(f"step takes one token, x (B, 1, D), got x of shape {x.shape}")
        return self.extend(x, state)
