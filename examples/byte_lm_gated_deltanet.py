"""
Train a byte language model
===========================

A language model of bytes with Gated DeltaNet, a recurrence whose state has a constant size. It
learns from the source code of effattn itself, and then writes a few lines.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import effattn
from effattn import nn

# %%
# Bytes need no tokenizer: the vocabulary has 256 tokens, and any file is text. `split` and `join`
# make every run of spaces one space.

files = sorted(pathlib.Path(effattn.__file__).parent.glob("functional/*.py"))
words = b" ".join(file.read_bytes() for file in files).split()
text = np.frombuffer(b" ".join(words), np.uint8)
print(f"{len(text):,} bytes of {len(files)} files")

# %%
# `mixer` names the mechanism of all layers; another registered name, such as "softmax", changes
# nothing else. Gated DeltaNet knows the order of tokens by itself, so the model has no positions.

config = nn.TransformerConfig(
    vocab_size=256, num_layers=1, features=96, num_heads=2, mixer="gated_delta_net"
)
model = nn.TransformerLM(config, rngs=nnx.Rngs(0))

# %%
# `nnx.jit` compiles the step, and carries the changes of the model and the optimiser out of it.

optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, bytes_):
    def bits_per_byte(model):
        logits = model(bytes_[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, bytes_[:, 1:])
        return losses.mean() / jnp.log(2)

    loss, gradients = nnx.value_and_grad(bits_per_byte)(model)
    optimizer.update(model, gradients)
    return loss


rng, length = np.random.default_rng(0), 128
for step in range(101):
    starts = rng.integers(len(text) - length, size=(8, 1))
    loss = train_step(model, optimizer, text[starts + np.arange(length + 1)].astype(np.int32))
    if step % 20 == 0:
        print(f"step {step:3}: {loss:.2f} bits per byte")

# %%
# `generate` reads the prompt in one call, and feeds back each byte that it draws. A longer text
# takes more time, and no more memory.

prompt = jnp.array([list(b"def ")])
sample = nn.generate(model, prompt, max_new_tokens=150, temperature=0.5, rng=jax.random.key(0))
print("def " + bytes(sample[0].tolist()).decode(errors="replace"))
