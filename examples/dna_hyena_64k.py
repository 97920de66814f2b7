"""
Read 65,536 bases with Hyena
============================

A language model of DNA with Hyena, whose convolutions are as long as the sequence. A training step
reads 65,536 bases at once, in memory that grows linearly with their number.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from effattn import nn

LENGTH = 65_536

# %%
# Each base depends on the base before it, by the same probabilities everywhere. So the least
# possible loss is known: the mean entropy of a row of the table. All four bases are equally
# frequent, so a model that ignores the past needs two bits per base.

chances = 0.1 + 0.6 * np.eye(4)[[0, 3, 1, 2]]
least = -(chances[0] * np.log2(chances[0])).sum()


def draw_bases(rng):
    following = [rng.choice(4, p=row, size=LENGTH).tolist() for row in chances]
    bases = [0]
    for step in range(LENGTH):
        bases.append(following[bases[-1]][step])
    return np.array(bases)


rng = np.random.default_rng(0)
print("".join("ACGT"[base] for base in draw_bases(rng)[:60]), "...")

# %%
# Hyena has a filter for each feature, with a tap for each position up to `max_length`; a small
# network computes the taps. It has no heads, so `num_heads` is 1.

config = nn.TransformerConfig(
    vocab_size=4, num_layers=1, features=16, num_heads=1, mixer="hyena", max_length=LENGTH
)
model = nn.TransformerLM(config, rngs=nnx.Rngs(0))
STEPS = 24
rate = optax.cosine_decay_schedule(0.01, STEPS)
optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, bases):
    def bits_per_base(model):
        logits = model(bases[None, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, bases[None, 1:])
        return losses.mean() / jnp.log(2)

    loss, gradients = nnx.value_and_grad(bits_per_base)(model)
    optimizer.update(model, gradients)
    return loss


# %%
# The compiler says how much memory the step needs for temporary arrays.

compiled = train_step.lower(model, optimizer, draw_bases(rng)).compile()
temporary = compiled.memory_analysis().temp_size_in_bytes
print(f"temporary arrays of a step: {temporary / 1e6:,.0f} MB")
print(f"one table of all pairs of bases, in float32: {4 * LENGTH**2 / 1e6:,.0f} MB")

for step in range(STEPS):
    loss = compiled(model, optimizer, draw_bases(rng))
    if step % 4 == 3:
        print(f"step {step + 1:2}: {loss:.3f} bits per base, at least {least:.3f}")
