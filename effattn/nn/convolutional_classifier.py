"""Text classifier with convolutions of several widths, a baseline."""

from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, mesh_axes
from effattn.arrays.segments import within
from effattn.decode.state import new_lengths
from effattn.nn import initializers
from effattn.nn.dropout import check_dropout_rate, dropout, dropout_key
from effattn.nn.layers import Layers
from effattn.nn.module import Module
from effattn.nn.options import Parameters
from effattn.nn.tokens import indices_of, token_ids


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
      **options: see `effattn.nn.options.Parameters`.

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
        **options: Unpack[Parameters],
    ):
        if not isinstance(widths, Sequence) or not widths:
            raise ValueError(f"widths must be a list of one or more ints, got {widths!r}")
        for width in widths:
            checks.at_least("each of widths", width, 1, "tokens")
        checks.at_least("vocab_size", vocab_size, 1, "tokens")
        checks.at_least("num_classes", num_classes, 1, "classes")
        checks.at_least("features", features, 1, "features")
        checks.at_least("filters", filters, 1, "filters")
        check_dropout_rate(dropout_rate)
        self.widths, self.dropout_rate = tuple(widths), dropout_rate
        numbers = Layers(**options).numbers
        # No dtype: the convolutions cast the rows, so gradients of rows are summed in param_dtype.
        self.embed = nnx.Embed(
            vocab_size,
            features,
            embedding_init=initializers.embedding_init,
            **{**numbers, "dtype": None},
        )
        self.convolutions = nnx.List(
            nnx.Conv(features, filters, (width,), padding="VALID", **numbers) for width in widths
        )
        self.out = nnx.Linear(filters * len(widths), num_classes, **numbers)

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
