"""Linformer: softmax attention over sums of all keys and values."""

import jax.numpy as jnp
import numpy as np

from tests.references.reference import Reference
from tests.references.softmax import softmax


def linformer(arrays, pairs, keep, *, key_projection, value_projection, **options):
    """Zeros where nothing is, the sums, and attention to all of them."""
    length, rows = arrays["key"].shape[-3], np.shape(key_projection)[-2]
    present = pairs.allowed.any(-2)

    def project(projection, array):
        projection = jnp.asarray(projection)[..., :length]
        array = jnp.where(present[..., None, None], array, 0)
        each = jnp.broadcast_to(projection, (array.shape[-2], *projection.shape[-2:]))
        dtype = jnp.promote_types(array.dtype, jnp.float32)
        return jnp.einsum("krs,...skh->...rkh", each.astype(dtype), array.astype(dtype)).astype(
            array.dtype
        )

    key = project(key_projection, arrays["key"])
    value = project(value_projection, arrays["value"])
    allowed = pairs.allowed.any(-1, keepdims=True)
    allowed = jnp.broadcast_to(allowed, (*allowed.shape[:-1], rows))
    keep = None if keep is None else keep[..., :rows]
    arrays = {**arrays, "key": key, "value": value}
    return softmax(arrays, pairs._replace(allowed=allowed), keep, **options)


def projections(rows, length):
    """Random ones, with rows of the values' that sum to 1, so that equal values are kept."""
    rng = np.random.default_rng(0)
    of_keys, of_values = rng.normal(size=(2, *rows, length)) / length**0.5
    of_values[..., -1] += 1 - of_values.sum(-1)
    return {"key_projection": of_keys, "value_projection": of_values}


LINFORMER = Reference(
    attend=linformer,
    variants={"": projections((7,), 17), "by head": projections((2, 6), 19)},
    tuning={"tile": (5, 4)},
)
