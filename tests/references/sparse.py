"""Sparse mechanisms: softmax attention over the pairs of a pattern."""

import numpy as np

from tests.references.reference import Reference
from tests.references.softmax import softmax


def sparse_transformer(arrays, pairs, keep, *, stride, **options):
    """The strided pattern, merged."""
    keys = arrays["key"].shape[-3]
    back = pairs.position[..., None] - np.arange(keys)
    pattern = (back >= 0) & ((back <= stride) | (back % stride == 0))
    return softmax(arrays, pairs._replace(allowed=pairs.allowed & pattern), keep, **options)


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
