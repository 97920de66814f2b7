"""Counter-based dropout: whether a weight is kept depends on its seed and indices alone.

The random bits are a function of example b, head h, query i and key j. All implementations, tile
sizes and backward passes therefore draw the same bits.
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
      Two uint32 arrays of random bits. The function uses 32-bit additions, shifts and exclusive
      ors only, so it runs inside any kernel.
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
    """Seed for `keep`, uint32 `(2,)`, from a `jax.random` key of any kind."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def keep(
    seed: jax.Array, rate: float, b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array
) -> jax.Array:
    """Dropout mask: True with probability 1 - rate.

    Example b, head h, query i and key j are integer arrays that broadcast together.
    """
    b, h, i, j = (x.astype(jnp.uint32) for x in (b, h, i, j))
    head_key = threefry2x32((seed[0], seed[1]), (b, h))
    bits, _ = threefry2x32(head_key, (i, j))
    return bits >= jnp.uint32(min(round(rate * 2.0**32), 2**32 - 1))
