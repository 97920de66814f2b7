"""Self-attention of Longformer: sliding windows and global tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, mesh_axes
from effattn.arrays.segments import positions_from
from effattn.cores import sequence_parts
from effattn.decode.longformer import LongformerDecoder
from effattn.nn.attention import refuse
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention

_GLOBAL = ("global_query", "global_key", "global_value")


class LongformerSelfAttention(SelfAttention):
    """Mixer with sliding windows and global tokens (Beltagy et al. 2020, "Longformer").

        q, k, v = x Wq, x Wk, x Wv;   y = longformer_attention(q, k, v) Wo

    Global tokens attend to all tokens, and all tokens attend to global tokens. The option
    `global_tokens` says which these are in each row or packed document; or with `max_global` alone,
    the argument `global_mask` of each call selects them. With `global_projections`, the queries of
    global tokens, and the keys and values that these queries read, use separate projections with
    equal initial weights, as in the paper:

        q, k, v = x Wgq, x Wgk, x Wgv    in attention from global tokens

    For the attended pairs and the cost see `effattn.longformer_attention`. With neither option the
    mixer is a sliding window, with the decode state of a sliding window. The decode state with
    `global_tokens` at the start also holds these tokens. In the other cases, it holds the global
    tokens, and the keys and values of the whole prefix, which a step reads only if its token is
    global.

    Args:
      global_tokens: the global tokens of each row or packed document: n, for its first n tokens, or
        a sequence of positions, from 0. A shorter document has fewer of them.
      max_global: maximum number of global tokens per row; the first `max_global` count. It bounds
        `global_mask`. Packed rows with `global_tokens` need it, too: their number times the largest
        number of documents in a row.
      global_projections: whether global tokens have separate projections.
      **options: as in `SelfAttention`, and options of `effattn.longformer_attention`:
        `local_window_size`, default 127 on each side, and `dilation`, an int, or one int per query
        head.

    In a model, `global_mask` is an argument of the calls of `Transformer`, `TransformerLM` and
    `EncoderDecoder`, which give it to each mixer that takes it.

    Raises:
      ValueError: as `SelfAttention`; also for `global_projections` without global tokens.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        global_tokens: int | Sequence[int] = 0,
        max_global: int | None = None,
        global_projections: bool = False,
        **options: SelfAttentionOptions,
    ):
        of_call = tuple(name for name in options if name.startswith("global_"))
        advice = "the argument global_mask of each call selects the global tokens"
        refuse(type(self), options, of_call, advice)
        super().__init__(in_features, num_heads, "longformer", **options)
        if max_global is not None and (not checks.is_integer(max_global) or max_global < 1):
            raise ValueError(f"max_global must be an int, 1 or more, or None, got {max_global!r}")
        self.global_tokens = _positions_of(global_tokens)
        count = len(self.global_tokens)
        if max_global is not None and count > max_global:
            raise ValueError(
                f"max_global={max_global}, the number of global tokens in a row, must be at least "
                f"the number of global_tokens of a document, got {count}"
            )
        if global_projections and not (count or max_global):
            raise ValueError(
                "global_projections=True needs global tokens: global_tokens, or max_global, the "
                "largest number of tokens that global_mask selects"
            )
        self.max_global = max_global
        self.global_query = nnx.clone(self.query) if global_projections else None
        self.global_key = nnx.clone(self.key) if global_projections else None
        self.global_value = nnx.clone(self.value) if global_projections else None

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences; further arguments as in `SelfAttention`.

        `global_mask` is bool `(B, T)`, True for global tokens. It must be None with
        `global_tokens`; otherwise None means that no token is global. Global tokens, too, attend
        within equal `segment_ids`.
        """
        sequence_parts.check_mixer(self)
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        if global_mask is not None:
            global_mask = self._checked(global_mask, x.shape[:2])
        elif self.global_tokens:
            if segment_ids is not None and self.max_global is None:
                raise ValueError(
                    "segment_ids with global_tokens need max_global, the largest number of global "
                    "tokens in a row; make the module with max_global, "
                    f"{len(self.global_tokens)} times the largest number of documents in a row"
                )
            places = sequence_parts.positions(x.shape[1], keywords.get("segment_ids"))
            global_mask = jnp.broadcast_to(self._are_global(places), x.shape[:2])
        if global_mask is not None:
            checks.known_length("Longformer with global tokens", x, axis=-2)
            keywords["global_mask"] = global_mask
            keywords["max_global"] = min(self._most, sequence_parts.all_tokens(x.shape[1]))
            if self.global_query is not None:
                keywords.update(zip(_GLOBAL, self._global_heads(x, positions), strict=True))
        heads = self._heads(x, positions)
        return self.out(self._attend(heads, **keywords, **self._dropout(rngs)))

    def extend(
        self,
        x: jax.Array,
        state: Any,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Mixes new tokens that follow `state`; arguments as in `SelfAttention` and `__call__`."""
        if global_mask is not None:
            global_mask = self._checked(global_mask, np.shape(x)[:2])
        return self._extended(x, state, lengths, global_mask)

    def _extend(self, x, state, lengths, global_mask=None):
        if not self._most:
            return super()._extend(x, state, lengths)
        if self.global_tokens:
            global_mask = self._are_global(positions_from(state.length, x.shape[1]))
        positions = self._positions(x, state)
        heads, global_heads = self._heads(x, positions), self._global_heads(x, positions)
        out, state = self._decoder().extend(heads, global_heads, state, lengths, global_mask)
        return self.out(out), state

    def _global_heads(self, x, positions):
        key, value = self._project_keys(x, self.global_key, self.global_value)
        query, key = self._rotated(self._project_queries(x, self.global_query), key, positions)
        return query, key, value

    @property
    def _most(self) -> int:
        """Maximum number of global tokens per row."""
        return self.max_global or len(self.global_tokens)

    @property
    def takes_global_mask(self) -> bool:
        """True if calls select the global tokens by `global_mask`."""
        return self.max_global is not None and not self.global_tokens

    def _are_global(self, places: jax.Array) -> jax.Array:
        """Bool of the shape of `places`: the tokens at these positions of documents are global."""
        if self._are_leading:
            return places < len(self.global_tokens)
        return jnp.isin(places, np.array(self.global_tokens, np.int32))

    @property
    def _are_leading(self) -> bool:
        """True if the global tokens of a document are its first tokens."""
        return self.global_tokens == range(len(self.global_tokens))

    def _decoder(self) -> Any:
        of_window = super()._decoder()
        if not self._most:
            return of_window
        # A decoded row is one document.
        most = len(self.global_tokens) or self.max_global
        leading = bool(self.global_tokens) and self._are_leading
        return LongformerDecoder({**self._options(), "max_global": most}, leading)

    def _checked(self, global_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if self.global_tokens:
            raise ValueError(
                "global_mask must be None with global_tokens, which are those at the positions "
                f"{_quoted(self.global_tokens)}; make the module with max_global alone"
            )
        if self.max_global is None:
            raise ValueError(
                "global_mask needs max_global, the largest number of global tokens in a row, got "
                "None; make the module with max_global"
            )
        global_mask = checks.as_array("global_mask", global_mask)
        if global_mask.shape != shape or global_mask.dtype != jnp.bool_:
            raise ValueError(
                f"global_mask must be bool of shape {shape}, got {global_mask.dtype} of shape "
                f"{global_mask.shape}"
            )
        return global_mask


def _positions_of(given: Any) -> Sequence[int]:
    """The positions of the global tokens: a `range` for the first tokens, or a sorted tuple."""
    if checks.is_integer(given):
        return range(checks.at_least("global_tokens", given, 0, "tokens"))
    is_sequence = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
    found = list(given) if is_sequence else []
    if not found or not all(checks.is_integer(x) and 0 <= x < 2**30 for x in found):
        raise ValueError(
            "global_tokens must be a number of tokens, or one or more positions, ints from 0, got "
            f"{given!r}"
        )
    found = sorted({int(x) for x in found})
    return range(len(found)) if found[-1] == len(found) - 1 else tuple(found)


def _quoted(positions: Sequence[int]) -> str:
    return ", ".join(map(str, positions[:8])) + ", ..." * (len(positions) > 8)
