"""Convolutional baselines: a mixer with dilated causal convolutions, and a text classifier."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from, within
from effattn.decode.recurrent import RecurrentState
from effattn.decode.state import bounded, check_bound, new_lengths, row_lengths
from effattn.nn import initializers
from effattn.nn.dropout import check_dropout_rate, dropout, dropout_key
from effattn.nn.module import Module
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.tokens import indices_of, token_ids


class DilatedConvolution(RecurrentMixer):
    """Mixer with a gated dilated causal convolution (Dauphin et al. 2017).

        a_t, g_t = sum_(j < W) x_(t - j d) K_j + b;   y_t = (a_t sigmoid(g_t)) W_out

    In a `Transformer` the dilation d doubles from layer to layer, as in WaveNet (van den Oord et
    al. 2016). Time is O(T W D^2); the decode state holds the last (W - 1) d tokens.

    Args:
      in_features: D, number of features per token.
      width: W, number of taps, including the current token.
      dilation: d, distance between taps.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the convolution and the output projection.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    def __init__(
        self,
        in_features: int,
        *,
        width: int = 4,
        dilation: int = 1,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            "convolution",
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.width = checks.at_least("width", width, 1, "tokens")
        self.dilation = checks.at_least("dilation", dilation, 1, "tokens")
        shape = (width, in_features, 2 * in_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros((2 * in_features,), param_dtype))
        self.out = nnx.Linear(
            in_features,
            in_features,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            rngs=rngs,
        )

    def _mix(self, x, state, lengths, segment_ids):
        batch, time = x.shape[:2]
        dtype = self._computed_in(x)
        before = jnp.zeros((batch, 0, self.in_features), x.dtype) if state is None else state
        kept = before.shape[1]
        read = jnp.concatenate([before.astype(x.dtype), x], 1)
        y = jnp.zeros((), dtypes.wide(dtype))
        ids = None if segment_ids is None else jnp.asarray(segment_ids)
        for j, kernel in enumerate(self.kernel[...].astype(dtype)):
            tokens = _before(read, j * self.dilation, time).astype(dtype)
            if ids is not None:
                same = _before(ids, j * self.dilation, time) == ids
                tokens = jnp.where(same[..., None], tokens, 0)
            y = y + jnp.matmul(tokens, kernel, preferred_element_type=y.dtype)
        value, gate = jnp.split((y + lead(self.bias[...], 3).astype(y.dtype)).astype(dtype), 2, -1)
        if lengths is None:
            last = read[:, time:]
        else:
            at = positions_from(row_lengths(lengths, batch, time), kept)
            last = jnp.take_along_axis(read, at[..., None], 1, mode="clip")
        return self.out(value * jax.nn.sigmoid(gate)), last.astype(before.dtype)

    @property
    def _reach(self) -> int:
        """Number of earlier tokens in the receptive field, (W - 1) d."""
        return (self.width - 1) * self.dilation

    def _empty(self, batch, max_length, dtype):
        slots, bound = bounded(self._reach, max_length)
        last = jnp.zeros((batch, slots, self.in_features), dtype)
        return RecurrentState(last, jnp.zeros((batch,), jnp.int32), bound)

    def _capacity(self, state):
        return self._reach if state.max_length is None else state.max_length

    def _extend(self, x, state, lengths):
        check_bound(state, new_lengths(lengths, *x.shape[:2]), state.state.shape[1], self._reach)
        return super()._extend(x, state, lengths)


def _before(read: jax.Array, steps: int, time: Any) -> jax.Array:
    """The last `time` tokens of `read (B, S, ...)`, delayed by `steps`; zeros before token 0."""
    if not isinstance(time, int):  # symbolic length in an exported program
        padded = jnp.pad(read, ((0, 0), (steps, 0), *[(0, 0)] * (read.ndim - 2)))
        return jax.lax.slice_in_dim(padded, read.shape[1] - time, read.shape[1], axis=1)
    missing = min(max(steps + time - read.shape[1], 0), time)
    start = max(read.shape[1] - time - steps, 0)
    found = jax.lax.slice_in_dim(read, start, start + time - missing, axis=1)
    return jnp.pad(found, ((0, 0), (missing, 0), *[(0, 0)] * (read.ndim - 2)))


class ConvolutionalClassifier(Module):
    """Text classifier with convolutions of several widths (Kim 2014).

        logits = dropout(max_t relu(convolution_W(embed(tokens)))_t, for each width W) W_out + b

    "Convolutional Neural Networks for Sentence Classification". Convolutions use no padding at the
    ends of the text, except that a text shorter than a width is extended with zeros. Time is
    O(T sum(W) D F).

    Args:
      vocab_size: V, number of token ids.
      num_classes: C, number of classes.
      features: D, size of the token embedding.
      widths: widths of the convolutions, in tokens.
      filters: F, number of filters per width.
      dropout_rate: dropout rate of the pooled convolution outputs.
      dtype: computation dtype; default is the parameter dtype.
      param_dtype: dtype of the parameters.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes; in calls, tokens that are not integers `(B, T)`.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        *,
        features: int = 128,
        widths: Sequence[int] = (3, 4, 5),
        filters: int = 100,
        dropout_rate: float = 0.5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if not isinstance(widths, Sequence) or not widths:
            raise ValueError(f"widths must be one or more ints, got {widths!r}")
        for width in widths:
            checks.at_least("each of widths", width, 1, "tokens")
        checks.at_least("vocab_size", vocab_size, 1, "tokens")
        checks.at_least("num_classes", num_classes, 1, "classes")
        checks.at_least("features", features, 1, "features")
        checks.at_least("filters", filters, 1, "filters")
        check_dropout_rate(dropout_rate)
        self.widths, self.dropout_rate = tuple(widths), dropout_rate
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        # No dtype: the convolutions cast the rows, so gradients of rows are summed in param_dtype.
        self.embed = nnx.Embed(
            vocab_size,
            features,
            embedding_init=initializers.embedding_init,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.convolutions = nnx.List(
            [
                nnx.Conv(features, filters, (width,), padding="VALID", rngs=rngs, **dtypes)
                for width in widths
            ]
        )
        self.out = nnx.Linear(filters * len(widths), num_classes, rngs=rngs, **dtypes)

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Returns the class logits.

        Args:
          tokens: `(B, T)` int, from 0 to V - 1, checked when concrete; traced
            tokens out of range give NaN. Padding may hold any value.
          lengths: `(B,)` int, valid tokens of each right-padded row; default all.
          rngs: `nnx.Rngs` or a key for dropout; None disables dropout.

        Returns:
          `(B, C)`.
        """
        tokens = token_ids(tokens)
        batch, time = tokens.shape
        lengths = new_lengths(lengths, batch, time)
        valid = within(lengths, time)
        indices = indices_of(tokens, valid, self.embed.num_embeddings)
        x = jnp.where(valid[..., None], self.embed(indices), 0)
        x = jnp.pad(x, ((0, 0), (0, max(self.widths) - 1), (0, 0)))
        found = []
        for width, convolution in zip(self.widths, self.convolutions, strict=True):
            y = jax.nn.relu(convolution(x))
            # Windows that end within the text; for a shorter text, only the first window.
            begun = within(jnp.maximum(lengths - width + 1, 1), y.shape[1])
            found.append(jnp.where(begun[..., None], y, 0).max(1))
        return self.out(dropout(jnp.concatenate(found, -1), self.dropout_rate, dropout_key(rngs)))
