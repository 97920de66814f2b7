"""
Images with a two-dimensional window
====================================

A small network that removes noise from images. Each pixel attends to the pixels at most a few rows
and columns away, by a pattern that counts in rows and columns.
"""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import effattn
from effattn import nn
from effattn.patterns import Grid

# %%
# In a flattened image the neighbours of a pixel are not contiguous. `Grid` keeps those within
# `window` rows and columns; attention visits only the tiles that hold such pairs.

SIDE = 32
pattern = Grid(SIDE, SIDE, window=3)
print(pattern.layout(SIDE * SIDE))

# %%
# `SelfAttention` makes a layer of any attention function, whose arguments are further options.


class Denoiser(nnx.Module):
    def __init__(self, features, *, rngs):
        self.embed = nnx.Linear(1, features, rngs=rngs)
        self.attention = nn.SelfAttention(
            features, 4, effattn.sparse_attention, pattern=pattern, is_causal=False, rngs=rngs
        )
        self.out = nnx.Linear(features, 1, rngs=rngs)

    def __call__(self, images):
        pixels = self.embed(images.reshape(-1, SIDE * SIDE, 1))
        pixels += self.attention(pixels)
        return self.out(nnx.gelu(pixels)).reshape(images.shape)


# %%
# The images are rings of random place and size. The mean square of the noise is 0.16.


def draw_images(rng, count):
    y, x = np.mgrid[:SIDE, :SIDE]
    centre, radius = rng.uniform(10, 22, (2, count, 1, 1)), rng.uniform(4, 10, (count, 1, 1))
    distance = np.hypot(y - centre[0], x - centre[1])
    clean = ((radius - 3 < distance) & (distance < radius)).astype(float)
    return clean, clean + rng.normal(0, 0.4, clean.shape)


@nnx.jit
def train_step(model, optimizer, clean, noisy):
    loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(noisy) - clean) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


model, rng = Denoiser(32, rngs=nnx.Rngs(0)), np.random.default_rng(0)
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
for step in range(101):
    loss = train_step(model, optimizer, *draw_images(rng, 8))
    if step % 25 == 0:
        print(f"step {step:3}: mean squared error {loss:.3f}")

# %%
# From the left: the keys of one pixel; a new image with its noise, restored, and without noise.

clean, noisy = draw_images(rng, 1)
keys = pattern.mask(SIDE**2, SIDE**2)[20 * SIDE + 6].reshape(SIDE, SIDE)
_, axes = plt.subplots(1, 4, figsize=(8, 2.2))
for ax, image in zip(axes, (keys, noisy[0], model(noisy)[0], clean[0]), strict=True):
    ax.imshow(image, cmap="gray")
    ax.set_axis_off()
