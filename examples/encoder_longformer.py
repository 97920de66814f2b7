"""
Classify rows with Longformer
=============================

An encoder with Longformer attention: each token attends to a window of its neighbours, and one
global token, the first of each row, attends to all tokens. The classifier reads this token alone.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from effattn import nn

# %%
# A row has random words, and `MARK` at a few places. The word after each `MARK` is the class of the
# row. Rows have different lengths; the rest of a row is padding.

FIRST, MARK, CLASSES, WORDS, LENGTH = 0, 1, 4, 16, 128


def draw_rows(rng, count):
    tokens = rng.integers(2, 2 + WORDS, (count, LENGTH))
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, count)
    labels = rng.integers(CLASSES, size=count)
    tokens[:, 0] = FIRST
    for row, label, length in zip(tokens, labels, lengths, strict=True):
        places = 1 + 2 * rng.choice(length // 2 - 1, 8, replace=False)
        row[places], row[places + 1] = MARK, 2 + label
    return tokens, lengths, labels


# %%
# A `Transformer` maps tokens to features. In its layers `global_tokens=1` makes the first token of
# each row global. In the first layer a word learns from its window that it follows `MARK`; in the
# second layer the global token finds such words, wherever they are.


class Classifier(nnx.Module):
    def __init__(self, *, rngs):
        mixer = {"name": "longformer", "local_window_size": 4, "global_tokens": 1}
        sizes = {"vocab_size": 2 + WORDS, "num_layers": 2, "features": 32, "num_heads": 4}
        config = nn.TransformerConfig(**sizes, mixer=mixer, is_causal=False)
        self.encoder = nn.Transformer(config, rngs=rngs)
        self.head = nnx.Linear(config.features, CLASSES, rngs=rngs)

    def __call__(self, tokens, lengths):
        return self.head(self.encoder(tokens, lengths=lengths)[:, 0])


@nnx.jit
def train_step(model, optimizer, tokens, lengths, labels):
    def loss_of(model):
        logits = model(tokens, lengths)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


model, rng = Classifier(rngs=nnx.Rngs(0)), np.random.default_rng(0)
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
for step in range(161):
    loss = train_step(model, optimizer, *draw_rows(rng, 16))
    if step % 20 == 0:
        print(f"step {step:3}: loss {loss:.3f}")

# %%
# `lengths` says which tokens count. Whatever stands in the padding changes no bit of the result.

tokens, lengths, labels = draw_rows(rng, 64)
logits = model(tokens, lengths)
print(f"accuracy on new rows: {jnp.mean(logits.argmax(-1) == labels):.0%}")
is_padding = np.arange(LENGTH) >= lengths[:, None]
changed = model(np.where(is_padding, MARK, tokens), lengths)
print("largest change by other padding:", jnp.abs(changed - logits).max())
