"""Dropout by counter: whether a weight is kept is a function of its place alone.

Every implementation, and a backward that recomputes, draws the same bits for the weight of query i
on key j in head h of example b, whatever the tiles and their order.
"""

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key: tuple, counter: tuple) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32, 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
      key: two uint32 arrays or numbers.
      counter: two uint32 arrays; all four broadcast together.

    Returns:
      Two uint32 arrays of random bits. Only 32-bit adds, shifts and exclusive ors, so it runs
      inside any kernel.
    """
    k0, k1 = key
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = counter[0] + k0, counter[1] + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def seed_from_rng(rng: jax.Array) -> jax.Array:
    """The two uint32 words `(2,)` that `keep` takes, from a `jax.random` key of any kind."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def keep(
    seed: jax.Array, rate: float, b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array
) -> jax.Array:
    """True with probability 1 - rate, for example b, head h, query i and key j (they broadcast)."""
    b, h, i, j = (x.astype(jnp.uint32) for x in (b, h, i, j))
    head_key = threefry2x32((seed[0], seed[1]), (b, h))
    bits, _ = threefry2x32(head_key, (i, j))
    return bits >= jnp.uint32(min(round(rate * 2.0**32), 2**32 - 1))
