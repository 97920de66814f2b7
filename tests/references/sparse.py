"""Sparse mechanisms: softmax attention over the pairs of a pattern."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.references.reference import Reference
from tests.references.softmax import softmax


def sparse_transformer(arrays, pairs, keep, *, stride, **options):
    """The strided pattern, merged."""
    keys = arrays["key"].shape[-3]
    back = pairs.position[..., None] - np.arange(keys)
    pattern = (back >= 0) & ((back <= stride) | (back % stride == 0))
    return softmax(arrays, pairs._replace(allowed=pairs.allowed & pattern), keep, **options)


def block_sparse(arrays, pairs, keep, *, block_size, block_mask, **options):
    """A mask of blocks, at every pair."""
    i, j = pairs.position[..., None], np.arange(arrays["key"].shape[-3])
    pattern = block_mask(i // block_size, j // block_size)
    return softmax(arrays, pairs._replace(allowed=pairs.allowed & pattern), keep, **options)


def bigbird(arrays, pairs, keep, *, random_blocks, num_window_blocks=1, ends=(0, 0), **options):
    """Window, global blocks at the ends, and the random blocks of a table."""
    blocks = -(-arrays["key"].shape[-3] // options["block_size"])
    options.pop("num_global_blocks", None), options.pop("num_random_blocks", None)

    def block_mask(m, n):
        near = abs(m - n) <= num_window_blocks // 2
        drawn = (jnp.asarray(random_blocks)[m] == n[..., None]).any(-1)
        at_end = [(x < ends[0]) | (x >= blocks - ends[1]) for x in (m, n)]
        return near | drawn | at_end[0] | at_end[1]

    return block_sparse(arrays, pairs, keep, block_mask=block_mask, **options)


LONGFORMER = Reference(
    attend=softmax,
    variants={"": {"local_window_size": (3, 2)}},
    tuning={"tile": (5, 4)},
)

SPARSE_TRANSFORMER = Reference(
    attend=sparse_transformer,
    variants={"": {"stride": 4}},
    tuning={"tile": (5, 4)},
)

BLOCK_SPARSE = Reference(
    attend=block_sparse,
    variants={"": {"block_size": 3, "block_mask": lambda m, n: (m + 2 * n) % 3 != 1}},
    tuning={},
)

# Of the 6 blocks of 17 tokens; some are in the window or global too, and one is named twice.
RANDOM_BLOCKS = np.array([[3, 1], [4, -1], [0, 2], [1, 1], [0, 3], [2, 4]], np.int32)

BIGBIRD = Reference(
    attend=functools.partial(bigbird, ends=(1, 1)),
    variants={
        "": {
            "block_size": 3,
            "num_window_blocks": 1,
            "num_global_blocks": (1, 1),
            "random_blocks": RANDOM_BLOCKS,
        }
    },
    tuning={},
    # The last blocks are known only when all tokens are.
    decoding={"num_global_blocks": 1},
)

RANDOM = Reference(
    attend=bigbird,
    variants={"": {"block_size": 3, "random_blocks": RANDOM_BLOCKS}},
    tuning={},
)
