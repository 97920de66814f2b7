"""XLA's C interface for foreign functions, `xla/ffi/api/c_api.h`: the parts that kernels use.

Within a major version structures only grow, at their ends. A handler checks at each call that the
version and the sizes of structures are those that it was written for, and that every buffer has the
dtype and at least the rank that it expects: anything else is an error of XLA, not a wrong number.
"""

from collections.abc import Sequence
from typing import NamedTuple

VERSION = 0, 3  # of the interface, as it is in jaxlib 0.10.2

# Offsets in bytes. A structure begins with its size and its extensions, 8 bytes each.
FRAME = {
    "extension": 8,
    "api": 16,
    "context": 24,
    "stage": 32,
    "argument count": 56,
    "arguments": 72,
    "result count": 96,
    "results": 112,
    "attribute count": 136,
    "attribute types": 144,
    "attributes": 160,
}
BUFFER = {"dtype": 16, "data": 24, "rank": 32, "sizes": 40}
SCALAR = {"dtype": 0, "value": 8}
ARRAY = {"dtype": 0, "size": 8, "data": 16}
EXTENSION = {"kind": 8, "metadata": 24}
METADATA = {"major": 24, "minor": 28, "traits": 32}
API = {
    "major": 32,
    "minor": 36,
    "create error": 48,
    "destroy error": 64,
    "schedule": 136,
    "count threads": 144,
}
# The sizes of structures that hold all that is read of them.
SIZES = {"frame": FRAME["attributes"] + 8, "buffer": BUFFER["sizes"] + 8, "api": 152}

IS_METADATA, IS_EXECUTION = 1, 3
IS_ARRAY, IS_SCALAR = 1, 3  # kinds of attributes
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 3, 8, 9
DTYPES = {"int32": 4, "int64": 5, "float32": 11}


class Array(NamedTuple):
    """An argument or a result of a handler.

    Attributes:
      name: of the array.
      axes: how many axes it has beside the batch axes.
      dtype: of its entries.
    """

    name: str
    axes: int
    dtype: str = "float32"


class Signature(NamedTuple):
    """The buffers and attributes of a handler.

    Attributes:
      arguments: whose batch axes are those of the first result, or of length 1 where one entry is
        for all of them.
      results: of which the first has the batch axes and no others before them.
      integers: entries of the attribute `limits`, an array of int64; 0 for no attributes. The one
        attribute after it in the alphabet is a float32, `scale`.
    """

    arguments: Sequence[Array]
    results: Sequence[Array]
    integers: int = 0
