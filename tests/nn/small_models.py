"""A small Transformer language model, of which tests change options."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.nn import TransformerConfig, TransformerLM
from tests.nn.build import filled

CONFIG = TransformerConfig(
    vocab_size=13, num_layers=2, features=16, num_heads=4, num_kv_heads=2, qk_norm=True
)
WINDOW = {"name": "sliding_window", "local_window_size": (2, 0)}


# The smallest model: one layer and few parts.
PLAIN = {"num_layers": 1, "qk_norm": False, "positions": "none"}
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 9)).astype(np.int32)


def make(seed=0, **changes):
    return TransformerLM(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(seed))


def made(**changes):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: make(**changes), spread=0.1)


def loss(model, tokens, rngs=None):
    logits = model(tokens, rngs=rngs)
    return jnp.mean(-jax.nn.log_softmax(logits)[:, :-1, 0])


def close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
