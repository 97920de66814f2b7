"""Sizes of the recurrence kernels in Mosaic GPU, and sums of log decays.

The sum of the log decays from token j + 1 to token i of one chunk is c_i - c_j, with c the running
sum since the start of the chunk. Where c is large, the difference loses digits. Log decays are
therefore raised to at least -128, whose exponential is 0 in float32. Then |c| is below 2^14 to the
base of 2, and float32 rounds it by at most 2^-11. In tests, decays have relative errors of up to
2^-10, after up to 62 tokens that forget everything; bfloat16 rounds by up to 2^-9.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from effattn.pallas.mosaic_gpu.warpgroups import ROWS, WIDTH, padded
from effattn.pallas.recurrence import Arrays, How

CHUNK = 64  # tokens of a chunk, the rows of a product of one warpgroup
PROCESSORS = 132  # multiprocessors of an H100
_LEAST_LOG_DECAY = -128.0
_SHORTEST_PIECE = 8  # chunks


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a call; features and values are padded to multiples of `WIDTH`.

    Attributes:
      batch, length, query_heads, key_heads, value_heads, features, values: sizes of the arrays.
      decay: one for each "token", one for each "feature" of a token, or "none".
      interpreted: whether, or how, kernels are interpreted.
    """

    batch: int
    length: int
    query_heads: int
    key_heads: int
    value_heads: int
    features: int
    values: int
    decay: Literal["none", "token", "feature"]
    interpreted: Any

    @classmethod
    def of(cls, how: How, arrays: Arrays) -> "Plan":
        """Returns the plan of a call."""
        batch, length, query_heads, features = arrays.query.shape
        key_heads, (value_heads, values) = arrays.key.shape[2], arrays.value.shape[2:]
        features, values = (-(-size // WIDTH) * WIDTH for size in (features, values))
        heads = query_heads, key_heads, value_heads
        decay: Literal["none", "token", "feature"] = "none"
        if arrays.log_decay is not None:
            decay = "token" if arrays.log_decay.ndim == 3 else "feature"
        return cls(batch, length, *heads, features, values, decay, how.interpreted)

    @property
    def chunks(self) -> int:
        """Number of chunks; the last chunk can be partial."""
        return -(-self.length // CHUNK)

    @property
    def heads(self) -> int:
        """Number of heads of the output."""
        return max(self.query_heads, self.value_heads)

    @property
    def group(self) -> int:
        """Number of heads of the output that read one value head."""
        return self.heads // self.value_heads

    @property
    def tiles(self) -> tuple[int, int]:
        """Numbers of tiles of a state, along the features and along the values."""
        return self.features // ROWS, self.values // WIDTH

    def chunks_of_a_piece(self, heads: int) -> int:
        """Number of chunks that a walk over a state of `heads` heads takes in one block.

        A walk is cut into pieces if it would leave most of the GPU empty otherwise. As pieces are
        walked twice, once to find the states at their starts, two pieces would gain nothing.
        """
        blocks = self.batch * heads * math.prod(self.tiles)
        pieces = min(2 * PROCESSORS // blocks, self.chunks // _SHORTEST_PIECE)
        return self.chunks if pieces < 3 else -(-self.chunks // pieces)


def running_sums(log_decay: jax.Array) -> jax.Array:
    """Sums of log decays to the base of 2 since the start of each chunk: `(B, V, chunks * 64)`.

    Args:
      log_decay: `(B, T, V)`.
    """
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), _LEAST_LOG_DECAY)
    by_head = padded(jnp.swapaxes(log_decay, 1, 2) * math.log2(math.e), 2, CHUNK)
    chunks = by_head.reshape(*by_head.shape[:2], -1, CHUNK)
    return jnp.cumsum(chunks, -1).reshape(by_head.shape)
