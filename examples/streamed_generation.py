"""
Stream text from a recurrence
=============================

A recurrence remembers what it has read in a state of constant size. This script reads a prompt in
pieces, prints each byte as it comes, and compares the state with a KV cache.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from effattn import decode, nn

# %%
# The model learns the days of the week in a few seconds. Its layers are Mamba-2.

sizes = {"vocab_size": 128, "num_layers": 2, "features": 32, "num_heads": 4}
config = nn.TransformerConfig(**sizes, mixer="mamba2")
model = nn.TransformerLM(config, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
week = b"Monday Tuesday Wednesday Thursday Friday Saturday Sunday "
text = np.frombuffer(week * 4, np.uint8).astype(np.int32)


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_of(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


rng = np.random.default_rng(0)
for _ in range(60):
    loss = train_step(model, optimizer, text[rng.integers(len(week), size=(8, 1)) + np.arange(65)])
print(f"loss {loss:.3f}")

# %%
# `extend` reads any number of new tokens after a state, and returns their logits and the new
# state. So a prompt may arrive in pieces, and the answer one token at a time. `jax.jit` compiles
# one program for each length of a piece.

extend = jax.jit(lambda model, tokens, state: model.extend(tokens, state))
state = model.init_state(batch=1, max_length=1_000_000)
for piece in (b"Wednesday ", b"Thursday F"):
    logits, state = extend(model, jnp.array([list(piece)]), state)
    print(piece.decode(), end="", flush=True)
for _ in range(50):
    token = decode.sample_token(logits[:, -1])
    print(chr(token[0]), end="", flush=True)
    logits, state = extend(model, token[:, None], state)
print(f"\n{state.length[0]} tokens read")

# %%
# A KV cache has an entry for each token of `max_length`; the state of a recurrence does not depend
# on it. `jax.eval_shape` gives the sizes without allocating them.


def state_bytes(mixer, max_length):
    model = nn.TransformerLM(nn.TransformerConfig(**sizes, mixer=mixer), rngs=nnx.Rngs(0))
    state = jax.eval_shape(lambda: model.init_state(1, max_length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


lengths = 4 ** np.arange(3, 11)
_, ax = plt.subplots(figsize=(5, 3), layout="constrained")
for mixer in ("softmax", "mamba2"):
    found = [state_bytes(mixer, int(length)) for length in lengths]
    print(f"{mixer}: {found[0]:,} bytes for {lengths[0]} tokens, {found[-1]:,} for {lengths[-1]:,}")
    ax.loglog(lengths, found, label=mixer)
ax.legend()
ax.set(xlabel="tokens", ylabel="bytes of state")
