"""Random attention: each block of tokens attends to itself and to random blocks."""

import functools
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import numpy as np

from effattn import registry
from effattn.cores import attention, document_blocks
from effattn.functional import bigbird
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Packing, Score, Sink, Softmax, declared


class Options(Direction, Packing, Score, Sink, Softmax, total=False):
    """The shared options of `random_attention`."""


def naive(query, key, value, pairs, *, scale, block_size, random_blocks):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, random blocks `(n, r)`.

    Returns output and log-sum-exp.
    """
    options = {"block_size": block_size, "random_blocks": random_blocks}
    return bigbird.naive(query, key, value, pairs, scale=scale, **options)


@with_naive(over_pairs(naive, per_head={"random_blocks": 2}, made_by_head=bigbird.drawn_blocks))
@declared
def random_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_size: int,
    num_random_blocks: int = 3,
    seed: int = 0,
    random_blocks: jax.Array | np.ndarray | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Random attention, one part of BigBird (Zaheer et al. 2020, "Big Bird", section 2).

    With blocks of b tokens, the queries of block m attend to block m and to r random blocks. In
    this random graph, information reaches all n blocks in O(log n) layers. Packed rows are those of
    `effattn.bigbird_attention`.

    Time O(T b (1 + r) (H + Hv)), memory O(T), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      block_size: b, tokens in a block, 1 or more. T need not be a multiple of it.
      num_random_blocks: r. If fewer blocks are left, a block attends to all of these.
      seed: seed of the random blocks; key head k draws `patterns.RandomBlocks` with seed + k.
      random_blocks: given instead of `seed`, int `(n, r)` or `(K, n, r)` for n = ceil(T / b), -1
        for no block; may be traced. A block that is listed twice counts once. A table may be for a
        longer sequence.
      **options: direction, padding, packing, scale, soft cap, `score_mod`, sink, dropout,
        log-sum-exp and execution: see `effattn.options`. Causal calls draw the random blocks from
        earlier blocks. `segment_ids` are one array `(*B, T)`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values; in bidirectional calls, more random blocks than
        blocks.
      NotImplementedError: a named implementation does not take these arguments.
    """
    document_blocks.one_array(options.get("segment_ids"), query.shape[:-2])
    given = attention.check("random_attention", query, key, value, **options)
    return bigbird.attend(
        query,
        key,
        value,
        given,
        block_size=block_size,
        num_random_blocks=num_random_blocks,
        seed=seed,
        random_blocks=random_blocks,
        **_ONLY_RANDOM,
    )


# Random attention is BigBird with a window of one block and without global blocks.
_ONLY_RANDOM: Mapping[str, Any] = {"num_window_blocks": 1, "num_global_blocks": 0}

registry.register(
    registry.Mechanism(
        name="random",
        family="sparse",
        paper="Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences",
        function=random_attention,
        decoder="effattn.decode.gathered:GatheredDecoder",
        pattern=functools.partial(bigbird.pattern, **_ONLY_RANDOM),
        options={"block_size": 32, "num_random_blocks": 3},
        by_layer=bigbird.seed_of_layer,
        complexity="O(N b r)",
        time_exponent=1.0,
    )
)
