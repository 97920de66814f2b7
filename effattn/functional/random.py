"""Random attention: each block of tokens attends to itself and to random blocks."""

from typing import Any, Unpack

import jax
import numpy as np

from effattn import registry
from effattn.arrays import checks
from effattn.cores import attention
from effattn.functional import bigbird
from effattn.functional.block_sparse import attend_blocks
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Score, Sink, Softmax, declared
from effattn.patterns.reaching import positions_of_blocks


class Options(Direction, Score, Sink, Softmax, total=False):
    """The shared options of `random_attention`."""


def naive(query, key, value, pairs, *, scale, block_size, random_blocks):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, random blocks `(n, r)`.

    Returns output and log-sum-exp.
    """
    options = {"block_size": block_size, "random_blocks": random_blocks}
    return bigbird.naive(query, key, value, pairs, scale=scale, **options)


@with_naive(over_pairs(naive, per_head={"random_blocks": 2}, derived=bigbird.drawn_blocks))
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
    this random graph, information reaches all n blocks in O(log n) layers.

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
      **options: direction, padding, scale, soft cap, `score_mod`, sink, dropout, log-sum-exp and
        execution: see `effattn.options`. Causal calls draw the random blocks from earlier blocks.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values; in bidirectional calls, more random blocks than
        blocks.
      NotImplementedError: a named implementation does not take these arguments.
      TypeError: in forward-mode differentiation.
    """
    block_size = checks.at_least("block_size", block_size, 1, "tokens in a block")
    given = attention.check("random_attention", query, key, value, **options)
    checks.self_attention("random_attention", query, key)
    checks.known_length("random_attention", query)
    length, key_heads = key.shape[-3:-1]
    random = bigbird.check_random_blocks(random_blocks, length, block_size, key_heads)
    if random is None:
        random = bigbird.draw_random_blocks(
            length,
            block_size,
            num_random_blocks,
            seed,
            key_heads=key_heads,
            is_causal=given.is_causal,
            window=1,
            ends=(0, 0),
        )
    own = np.arange(random.shape[-2])[:, None]
    listed = bigbird.joined(own, random)
    with jax.named_scope("random_attention"):
        if length:
            out, lse = attend_blocks(query, key, value, given, listed, block_size)
        else:
            out, lse = attention.attend(query, key, value, given)
    return attention.results(out, lse, given)


def _reach(
    i,
    capacity: int,
    key_heads: int,
    block_size: int,
    num_random_blocks: int,
    seed: int,
    random_blocks: Any,
):
    """Returns the key positions of a query at position i, `(K, n)`; only 0 to i are valid."""
    block_size = checks.at_least("block_size", block_size, 1, "tokens in a block")
    random = bigbird.random_table(
        random_blocks,
        capacity,
        block_size,
        key_heads,
        num_random_blocks=num_random_blocks,
        seed=seed,
        window=1,
        ends=(0, 0),
    )
    own = i // block_size
    listed = bigbird.joined(own[None], random[..., own, :])
    return positions_of_blocks(listed, block_size, capacity)


registry.register(
    registry.Mechanism(
        name="random",
        family="sparse",
        paper="Zaheer et al. 2020, Big Bird",
        function=random_attention,
        decoder="effattn.decode.gathered:decoder",
        reach=_reach,
        options={"block_size": 32, "num_random_blocks": 3},
        complexity="O(N b r)",
        time_exponent=1.0,
    )
)
