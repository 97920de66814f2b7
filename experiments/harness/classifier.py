"""Classifiers of token sequences."""

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.nn import ConvolutionalClassifier, RoutingStats, Transformer, TransformerConfig


class Classifier(nnx.Module):
    """Transformer whose mean feature over the tokens of a row gives the logits of its class.

    Args:
      config: configuration of the Transformer.
      num_classes: C, number of classes.
      rngs: random streams for parameter initialisation.
    """

    def __init__(self, config: TransformerConfig, num_classes: int, *, rngs: nnx.Rngs):
        self.transformer = Transformer(config, rngs=rngs)
        self.head = nnx.Linear(config.out_features, num_classes, rngs=rngs)

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Returns logits `(B, C)` of tokens `(B, T)`, of which the first `lengths (B,)` count."""
        return self.with_routing(tokens, lengths)[0]

    def with_routing(
        self, tokens: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[RoutingStats, ...]]:
        """Returns the logits, and the statistics of each layer that has experts."""
        features, routing = self.transformer.with_routing(tokens, lengths=lengths)
        if lengths is None:
            return self.head(features.mean(1, dtype=jnp.float32)), routing
        is_token = jnp.arange(tokens.shape[1]) < lengths[:, None]
        total = jnp.where(is_token[..., None], features, 0).sum(1, dtype=jnp.float32)
        return self.head(total / jnp.maximum(lengths, 1)[:, None]), routing

    def update_centroids(self, tokens: jax.Array, lengths: jax.Array | None = None) -> None:
        """Updates centroids as `Transformer.update_centroids`."""
        self.transformer.update_centroids(tokens, lengths=lengths)


class Convolutional(ConvolutionalClassifier):
    """Convolutional classifier that is called with the inputs of a task."""

    def __call__(  # type: ignore[override]
        self, tokens: jax.Array, lengths: jax.Array | None = None
    ) -> jax.Array:
        return super().__call__(tokens, lengths=lengths)
