"""Block Linformer: softmax attention over every token and every slot of a block, at once."""

import jax.numpy as jnp
import numpy as np

from tests.references.linformer import projections
from tests.references.reference import Reference
from tests.references.softmax import softmax


def block_linformer(arrays, pairs, keep, *, key_projection, value_projection, **options):
    """Slots are further keys, which the tokens of later blocks see, and no others."""
    length = arrays["key"].shape[-3]
    slots, size = np.shape(key_projection)[-2:]
    at, blocks = np.arange(length), np.arange(-(-length // size))
    present = jnp.asarray(pairs.allowed).any(-2)
    inside = np.pad(at, (0, -length % size), constant_values=length).reshape(-1, size)

    def with_slots(array, projection):
        """`(*B, S + M r, K, H)`."""
        array = jnp.where(present[..., None, None], array, 0)
        padded = jnp.concatenate([array, jnp.zeros_like(array[..., :1, :, :])], -3)
        dtype = jnp.promote_types(array.dtype, jnp.float32)
        each = jnp.broadcast_to(projection, (array.shape[-2], slots, size)).astype(dtype)
        of_blocks = padded[..., inside, :, :].astype(dtype)
        summed = jnp.einsum("krs,...mskh->...mrkh", each, of_blocks).astype(array.dtype)
        summed = summed.reshape(*array.shape[:-3], -1, *array.shape[-2:])
        return jnp.concatenate([array, summed], -3)

    own = at[:, None] // size == at // size
    # A query sees the slots of the blocks before its own that hold a key.
    before = np.repeat(blocks < at[:, None] // size, slots, -1)
    holds = jnp.repeat(present[..., np.minimum(blocks * size, length - 1)], slots, -1)
    valid = jnp.asarray(pairs.valid)[..., None]
    allowed = [pairs.allowed & own, before & holds[..., None, :] & valid]
    if keep is not None:
        token = (blocks[:, None] * size + np.arange(slots)).reshape(-1)
        keep = jnp.concatenate([keep, keep[..., np.minimum(token, length - 1)]], -1)
    arrays = {
        **arrays,
        "key": with_slots(arrays["key"], key_projection),
        "value": with_slots(arrays["value"], value_projection),
    }
    pairs = pairs._replace(allowed=jnp.concatenate(allowed, -1))
    return softmax(arrays, pairs, keep, **options)


def in_float32(rows, size):
    return {name: x.astype(np.float32) for name, x in projections(rows, size).items()}


BLOCK_LINFORMER = Reference(
    attend=block_linformer,
    variants={"": in_float32((2,), 4), "by head": in_float32((2, 3), 5)},
    tuning={"tile": (5, 4)},
    module={"block_size": 4, "num_projected": 2},
)
