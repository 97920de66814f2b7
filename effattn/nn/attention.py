"""Self-attention and cross-attention modules that call any attention function."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.arrays.segments import positions_from, positions_from_segment_ids, within
from effattn.decode.state import bound_of, check_init, check_rows, new_lengths
from effattn.nn import initializers
from effattn.nn.binding import bind
from effattn.nn.dropout import check_dropout_rate, dropout_key
from effattn.nn.heads import default_head_dim, key_heads
from effattn.nn.module import Module
from effattn.nn.options import check_holds_none, own_copy, split, values
from effattn.nn.rotary import RotaryEmbedding
from effattn.nn.tokens import padding_of, tokens_of, zero_padding

# Larger than every segment or block size in a decode state.
_MANY_TOKENS = 2**20


class _Attention(Module):
    """Base of `SelfAttention` and `CrossAttention`: projections and the attention function."""

    def __init__(
        self,
        in_features: int,
        context_features: int,
        num_heads: int,
        attention: str | Callable[..., Any],
        *,
        num_kv_heads: int | None,
        head_dim: int | None,
        value_dim: int | None = None,
        qk_norm: bool,
        dropout_rate: float,
        use_bias: bool,
        dtype: Any,
        param_dtype: Any,
        kernel_init: Callable[..., Any],
        out_kernel_init: Callable[..., Any] | None,
        rngs: nnx.Rngs,
        options: dict[str, Any],
    ):
        if head_dim is None:
            head_dim = default_head_dim(in_features, num_heads)
        num_kv_heads = key_heads(num_heads, num_kv_heads)
        function, binding, options = bind(attention, options)
        if num_kv_heads != num_heads:
            binding.require("grouped", f"num_kv_heads={num_kv_heads}")
        check_dropout_rate(dropout_rate)
        if dropout_rate:
            binding.require("dropout", f"dropout_rate={dropout_rate}")

        self.in_features = checks.at_least("in_features", in_features, 1, "features")
        self.context_features = checks.at_least("context_features", context_features, 1, "features")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim = checks.at_least("head_dim", head_dim, 1, "features")
        self.value_dim = (
            head_dim
            if value_dim is None
            else checks.at_least("value_dim", value_dim, 1, "features")
        )
        self.dropout_rate = dropout_rate
        self.dtype = dtype
        self.param_dtype = param_dtype
        check_holds_none("attention", function)
        self.attention = own_copy(function)
        self.binding = binding
        static, learned = split(options)
        self.options = tuple(static.items())
        self.array_options = nnx.Dict({name: nnx.data(x) for name, x in learned.items()})
        linear = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        project = functools.partial(linear, kernel_init=kernel_init)
        self.query = project(in_features, (num_heads, head_dim))
        self.key = project(context_features, (num_kv_heads, head_dim))
        self.value = project(context_features, (num_kv_heads, self.value_dim))
        self.out = linear(
            (num_heads, self.value_dim),
            in_features,
            axis=(-2, -1),
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
        )
        norm = functools.partial(
            nnx.RMSNorm, head_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.query_norm = norm() if qk_norm else None
        self.key_norm = norm() if qk_norm else None

    def _project(
        self, x: jax.Array, context: jax.Array, layers: tuple[Any, Any, Any] | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value; `layers` replaces the module's three projections if given."""
        of_query, *of_context = layers or (self.query, self.key, self.value)
        key, value = self._project_keys(context, *of_context)
        return self._project_queries(x, of_query), key, value

    def _project_queries(self, x: jax.Array, layer: Any = None) -> jax.Array:
        query = (layer or self.query)(x)
        return query if self.query_norm is None else self.query_norm(query)

    def _project_keys(
        self, context: jax.Array, of_key: Any = None, of_value: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        key, value = (of_key or self.key)(context), (of_value or self.value)(context)
        return key if self.key_norm is None else self.key_norm(key), value

    def _options(self) -> dict[str, Any]:
        return {**dict(self.options), **values(dict(self.array_options.items()))}

    def _dropout(self, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None) -> dict[str, Any]:
        key = dropout_key(rngs) if self.dropout_rate else None
        return {} if key is None else {"dropout_rate": self.dropout_rate, "dropout_rng": key}


class SelfAttention(_Attention):
    """Self-attention mixer around any attention function.

        q, k, v = x Wq, x Wk, x Wv;   y = attention(rotary(norm(q)), rotary(norm(k)), v) Wo

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      attention: a registered name (`effattn.registry.names()`), or a function of query
        `(B, T, N, H)`, key and value `(B, T, K, H)`: a function of `effattn`, a
        `functools.partial` of such a function, or any other function. The registry tells which
        further arguments a registered function takes; the signature tells it for other functions.
      num_kv_heads: K, number of key and value heads, a divisor of N; default N.
      head_dim: H, head dimension of queries and keys; default D / N.
      value_dim: Hv, head dimension of values; default H.
      rotary: rotary position embedding of queries and keys; None disables rotation.
      qk_norm: RMS-normalises the features of each query and key head, with a learned scale.
      is_causal: token t attends to tokens 0 to t only. With False, an unregistered function is
        called without `is_causal`, so its default applies.
      dropout_rate: dropout rate of the attention weights, if the function supports dropout.
        Dropout is active in calls that get `rngs`; `train()` and `eval()` have no effect.
      use_bias: whether the four projections have biases.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      rngs: random streams for parameter initialisation.
      **options: further arguments of the attention function, such as
        `local_window_size=(255, 0)`. An `nnx.Param` is learned
        (`sink=nnx.Param(jnp.zeros(num_heads))`); the parameters of an `nnx.Module` are learned too
        (a `score_mod` with a learned bias). The layer copies all parameters and modules that it is
        given, `attention` included, so two layers given the same object share no parameters.

    Raises:
      ValueError: inconsistent sizes, an unknown name or option, or an option that the mechanism
        does not support; the message names the mechanisms that support the option.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        attention: str | Callable[..., Any] = "softmax",
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rotary: RotaryEmbedding | None = None,
        qk_norm: bool = False,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(
            in_features,
            in_features,
            num_heads,
            attention,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            qk_norm=qk_norm,
            dropout_rate=dropout_rate,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
            options=options,
        )
        if rotary is not None and not isinstance(rotary, RotaryEmbedding):
            raise ValueError(f"rotary must be a RotaryEmbedding or None, got {rotary!r}")
        if rotary is not None and self.head_dim % 2:
            raise ValueError(
                f"rotary embedding needs an even head size, got {self.head_dim}; rotary=None does "
                "not turn"
            )
        if is_causal:
            self.binding.require("causal", "is_causal=True")
        else:
            self.binding.require("bidirectional", "is_causal=False")
        self.rotary = rotary
        self.is_causal = is_causal

    @mesh_axes.on_mesh_of_input
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
          segment_ids: `(B, T)` int, packed sequences: tokens attend within equal ids, 0 is
            padding, and positions count from the start of each document.
          rngs: `nnx.Rngs` or a key for dropout of attention weights; None disables dropout.

        Returns:
          `(B, T, D)`. Valid tokens do not depend on the padding.
        """
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        heads = self._heads(x, positions)
        keywords = {**keywords, **self._per_token(x), **self._dropout(rngs)}
        return self._finish(self._attend(heads, **keywords), x)

    def _attend(self, heads: tuple[jax.Array, ...], **keywords: Any) -> jax.Array:
        """Calls the attention function on (query, key, value); returns `(B, T, N, Hv)`."""
        self.binding.check_complete(keywords)
        return self.attention(*heads, **keywords)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        """Further per-token arguments of the attention function, by name."""
        return {}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        """Output `(B, T, D)` from the head outputs `(B, T, N, Hv)` and the input tokens x."""
        return self.out(out)

    def _whole(
        self, x: jax.Array, lengths: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, dict[str, Any]]:
        """Inputs for whole sequences.

        Returns:
          x with zeros in the padding; token positions, or None without rotary embedding; keyword
          arguments of the attention function.
        """
        x = tokens_of("x", x, self.in_features)
        batch, time = x.shape[:2]
        padding, valid = padding_of(self.binding, batch, time, lengths, segment_ids)
        if self.is_causal and self.binding.takes("is_causal"):
            padding["is_causal"] = True
        positions = None
        if self.rotary is not None:
            positions = (
                jnp.arange(time)
                if segment_ids is None
                else positions_from_segment_ids(padding["segment_ids"])
            )
        return zero_padding(x, valid), positions, {**self._options(), **padding}

    def _new(
        self, x: jax.Array, state: Any, lengths: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Inputs for new tokens that follow the tokens in `state`.

        Returns:
          x with zeros in the padding; token positions, or None without rotary embedding; checked
          lengths, or None.
        """
        x = tokens_of("x", x, self.in_features)
        batch, time = x.shape[:2]
        if not hasattr(state, "length"):
            raise ValueError(
                f"state must be one that init_state returned, got {type(state).__name__}"
            )
        check_rows(state, batch)
        self._check_shapes(state, batch)
        if lengths is not None:
            lengths = new_lengths(lengths, batch, time)
            x = zero_padding(x, within(lengths, time))
        positions = None if self.rotary is None else positions_from(state.length, time)
        return x, positions, lengths

    def _check_shapes(self, state: Any, batch: int) -> None:
        """Raises `ValueError` if `state` belongs to a layer of other sizes."""

        def empty(max_length):
            return jax.eval_shape(lambda: self.init_state(batch, max_length))

        def shapes(state):
            return [x.shape for x in jax.tree.leaves(state)]

        bound = bound_of(state)
        small = empty(_MANY_TOKENS if bound is None else bound)
        got, least = shapes(state), shapes(small)
        if got == least:
            return
        # Sizes that differ between `small` and `large` depend on the state's capacity.
        large = small if bound is not None else empty(2 * _MANY_TOKENS)
        if len({jax.tree.structure(s) for s in (state, small, large)}) > 1:
            return
        needed = [
            tuple(g if a != b else a for g, a, b in zip(*sizes, strict=False))
            for sizes in zip(got, least, shapes(large), strict=True)
        ]
        if got != needed:
            raise ValueError(
                f"state has arrays of shapes {got}, and this {type(self).__name__} needs {needed}; "
                "it is the state of another layer"
            )

    def _heads(
        self, x: jax.Array, positions: jax.Array | None, layers: tuple[Any, Any, Any] | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value of x; query and key are rotated if `rotary` is set."""
        query, key, value = self._project(x, x, layers)
        if self.rotary is not None and positions is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        return query, key, value

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> Any:
        """Returns the empty decode state of `batch` rows.

        Args:
          batch: B, number of rows.
          max_length: maximum number of tokens per row. A state of constant size has no such limit.
            A mechanism that caches only the last tokens is limited to `max_length` if `max_length`
            is below the size of its cache.
          dtype: dtype of cached keys and values, a float of at least 16 bits; default the
            module's `dtype`, or `param_dtype` if `dtype` is None.
        """
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        dtype = check_init(batch, max_length, dtype)
        token = jax.ShapeDtypeStruct((batch, 1, self.in_features), dtype)
        return self._decoder().init(
            batch,
            max_length,
            self.num_kv_heads,
            self.head_dim,
            self.value_dim,
            dtype,
            **jax.eval_shape(self._per_token, token),
        )

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
        return mesh_axes.extended(type(self)._extend, self, x, state, lengths)

    def _extend(self, x: jax.Array, state: Any, lengths: jax.Array | None) -> tuple[jax.Array, Any]:
        decoder = self._decoder()
        x, positions, lengths = self._new(x, state, lengths)
        heads = self._heads(x, positions)
        out, state = decoder.extend(*heads, state, lengths, **self._per_token(x))
        return self._finish(out, x), state

    def step(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Calls `extend` with one token per row, x `(B, 1, D)`."""
        x = tokens_of("x", x, self.in_features)
        if x.shape[1] != 1:
            raise ValueError(f"step takes one token, x (B, 1, D), got x of shape {x.shape}")
        return self.extend(x, state)

    def _decoder(self) -> Any:
        if not self.is_causal:
            raise ValueError(
                "a bidirectional SelfAttention cannot decode; make it with is_causal=True"
            )
        mechanism = self.binding.mechanism
        if mechanism is None or mechanism.decoder is None:
            raise NotImplementedError(
                f"how attention {self.binding.name!r} decodes is not known; give a registered "
                f"mechanism that decodes ({', '.join(registry.names('decode'))}), its function, "
                "or a functools.partial of it"
            )
        return registry.load(mechanism.decoder)(mechanism.function, self._options())


class CrossAttention(_Attention):
    """Cross-attention from tokens to a context, with any attention function.

        q = x Wq;   k, v = c Wk, c Wv;   y = attention(norm(q), norm(k), v) Wo

    Cross-attention is never causal and has no decode state. In a decoder, call the module on the
    new tokens; or call `project_context` once and `attend` for each new token. In both cases
    `query_offset` gives the position of the first new token.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      attention: as in `SelfAttention`.
      context_features: C, number of features per context token; default D.

    The other arguments are those of `SelfAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        attention: str | Callable[..., Any] = "softmax",
        *,
        context_features: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        dropout_rate: float = 0.0,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(
            in_features,
            in_features if context_features is None else context_features,
            num_heads,
            attention,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            dropout_rate=dropout_rate,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
            options=options,
        )
        self.binding.require("cross", "a context")
        self.binding.require("bidirectional", "a context")

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        context: jax.Array,
        *,
        lengths: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        context_segment_ids: jax.Array | None = None,
        query_offset: jax.Array | int | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Attends from x to the context.

        Args:
          x: `(B, T, D)`.
          context: `(B, S, C)`.
          lengths: `(B,)` int, valid tokens of x.
          context_lengths: `(B,)` int, valid tokens of the context.
          segment_ids: `(B, T)` int; tokens attend to context tokens with an equal id; 0 is
            padding.
          context_segment_ids: `(B, S)` int; given together with `segment_ids`.
          query_offset: int or `(B,)` int, position of the first token of x, for mechanisms that
            depend on positions; default None.
          rngs: `nnx.Rngs` or a key for dropout of attention weights; None disables dropout.

        Returns:
          `(B, T, D)`.
        """
        if (segment_ids is None) != (context_segment_ids is None):
            raise ValueError("segment_ids and context_segment_ids must be given together")
        key, value = self.project_context(
            context, lengths=context_lengths, segment_ids=context_segment_ids
        )
        return self.attend(
            x,
            key,
            value,
            lengths=lengths,
            context_lengths=context_lengths,
            segment_ids=segment_ids,
            context_segment_ids=context_segment_ids,
            query_offset=query_offset,
            rngs=rngs,
        )

    @mesh_axes.on_mesh_of_input
    def project_context(
        self,
        context: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Keys `(B, S, K, H)` and values `(B, S, K, H)` of a context, for calls of `attend`.

        Args:
          context: `(B, S, C)`.
          lengths: `(B,)` int, valid tokens of the context.
          segment_ids: `(B, S)` int; 0 is padding.
        """
        context = tokens_of("context", context, self.context_features)
        batch, size = context.shape[:2]
        _, valid = padding_of(self.binding, batch, size, lengths, segment_ids, "context_")
        return self._project_keys(zero_padding(context, valid))

    @mesh_axes.on_mesh_of_input
    def attend(
        self,
        x: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        context_segment_ids: jax.Array | None = None,
        query_offset: jax.Array | int | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Attends from x to the keys and values that `project_context` returned; `(B, T, D)`."""
        x = tokens_of("x", x, self.in_features)
        batch, time = x.shape[:2]
        self._check_projected(key, value)
        padding, valid = padding_of(self.binding, batch, time, lengths, segment_ids)
        of_context, _ = padding_of(
            self.binding, batch, key.shape[1], context_lengths, context_segment_ids, "context_"
        )
        keywords = {
            "query_seq_lengths": padding.get("query_seq_lengths"),
            "key_value_seq_lengths": of_context.get("key_value_seq_lengths"),
        }
        keywords = {name: array for name, array in keywords.items() if array is not None}
        if segment_ids is not None:
            keywords["segment_ids"] = (segment_ids, context_segment_ids)
        if query_offset is not None:
            keywords.update(self._placed(checks.as_array("query_offset", query_offset), x, key))
        query = self._project_queries(zero_padding(x, valid))
        keywords = {**self._options(), **keywords, **self._dropout(rngs)}
        self.binding.check_complete(keywords)
        out = self.attention(query, key, value, **keywords)
        return self.out(out)

    def _check_projected(self, key, value):
        heads = (self.num_kv_heads, self.head_dim)
        for name, array in (("key", key), ("value", value)):
            shape = np.shape(array)
            if len(shape) != 4 or shape[2:] != heads:
                raise ValueError(
                    f"{name} must be what project_context returned, (B, S, {heads[0]}, {heads[1]}),"
                    f" got shape {shape}"
                )

    def _placed(self, offset: jax.Array, x: jax.Array, key: jax.Array) -> dict[str, Any]:
        """Keyword arguments for the positions of x; empty if the mechanism ignores positions."""
        if self.binding.places_tokens:
            pair = positions_from(offset, x.shape[1]), jnp.arange(key.shape[1])
            lengths = x.shape[1], key.shape[1]
            return {
                "positions": tuple(
                    jnp.broadcast_to(positions, (x.shape[0], length))
                    for positions, length in zip(pair, lengths, strict=True)
                )
            }
        # A mechanism that reads keys through a recurrent state ignores query positions.
        if self.binding.registered and self.binding.has("state"):
            return {}
        self.binding.require("offset", "query_offset")
        return {"query_offset": offset}
