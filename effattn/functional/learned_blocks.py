"""Learned blocks: a selector chooses blocks of keys, trained by a straight-through estimator."""

import functools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import over_batch
from effattn.arrays.combine import combine
from effattn.arrays.segments import valid
from effattn.cores import attention, chosen_blocks, document_blocks, folding
from effattn.cores.document_blocks import Reach
from effattn.functional.moba import block_sums, check_options
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Packing, Padding, Precision, Residual, Scale, declared

# Minimum queries whose scores are in memory at a time.
_QUERIES = 128


class Options(Padding, Packing, Scale, Residual, Precision, total=False):
    """The shared options of `learned_block_attention`."""


class Sampling(Padding, Packing, Scale, Precision, total=False):
    """The shared options of `sampled_block_attention`."""


def naive(query, key, value, pairs, *, selection_query, selection_key, scale, block_size, top_k):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`. Returns output and log-sum-exp.

    In packed rows, blocks count from the start of the document.
    """
    # The number of each token's block in its document, and the token that begins the block.
    number, n = pairs.places // block_size, jnp.arange(len(key))
    start = n - pairs.places % block_size
    members = pairs.present & (start == n[:, None])  # (T, T), empty but for first tokens
    dtype = jnp.promote_types(selection_key.dtype, jnp.float32)
    exact = functools.partial(jnp.matmul, precision="highest")
    sums = exact(members.astype(dtype), selection_key.astype(dtype))
    means = sums / jnp.maximum(members.sum(1), 1)[:, None]
    scores = exact(selection_query.astype(dtype), means.T) / selection_key.shape[-1] ** 0.5
    is_same = pairs.query_ids[:, None] == pairs.key_ids
    is_past = is_same & (number < number[:, None]) & members.any(1)
    this, other = scores[:, :, None], scores[:, None]
    is_before = (other > this) | ((other == this) & (n < n[:, None]))
    rank = (is_before & is_past[:, None]).sum(2)
    chosen = is_past & (rank < top_k - 1)
    gates = jnp.where(chosen, jax.nn.sigmoid(scores), 0)
    logs = (gates - lax.stop_gradient(gates))[:, start]
    allowed = pairs.where((chosen | (n == start[:, None]))[:, start])
    weights, lse = allowed.softmax(scale * dot(query, key.T), logs)
    return dot(weights, value), lse


@with_naive(over_pairs(naive, per_query=("selection_query",), per_token=("selection_key",)))
@declared
def learned_block_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    selection_query: jax.Array,
    selection_key: jax.Array,
    block_size: int,
    top_k: int,
    **options: Unpack[Options],
) -> Any:
    r"""Attention to blocks that a learned selector chooses (Gao et al. 2024, "SeerAttention").

    Blocks have b tokens. A selector with queries p and keys r scores the blocks before the own one,

        s_in = p_i . mean(r_j for j in block n) / sqrt(Hs),

    and a query attends, in one softmax, to its own block up to itself and to the top_k - 1 earlier
    blocks with the largest scores; equal scores go to the earlier block. The choice is hard. For
    its gradient, a gate multiplies the exponentials of a chosen block. It is 1 in value and has the
    gradient of a sigmoid (straight-through estimator, Bengio et al. 2013):

        g_in = exp(u - stop_gradient(u)),   u = sigmoid(s_in)

    Always causal: a score reads blocks that have ended. All query heads of a key head choose alike.
    In packed rows, blocks count from the start of each document.

    Time O(T (T / b) Hs) for the scores and O(T top_k b (H + Hv)) for the attention. Memory
    O(T top_k Hv), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      selection_query: p, `(*B, T, K, Hs)`.
      selection_key: r, `(*B, T, K, Hs)`.
      block_size: b, tokens in a block, 1 or more. T need not be a multiple of it.
      top_k: blocks of a query, its own block included; 1 or more.
      **options: padding, packing, scale, log-sum-exp and precision: see `effattn.options`. Padded
        keys are in no mean. `segment_ids` are one array `(*B, T)`. `precision` applies to the
        products of the attention; scores have the highest.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes of the selection; and the errors of `effattn.options`.
    """
    name = "learned_block_attention"
    given, size, top_k, heads, selection = _checked(
        name, (query, key, value), (selection_query, selection_key), block_size, top_k, options
    )

    def run(query, key, value, selection_query, selection_key, lengths, ids, scale):
        heads, sums, at = _placed(size, (query, key, value), selection_key, lengths, ids)
        blocks, gates = choose(size, top_k, selection_query, sums, *at)
        arrays = *heads, blocks, gates, scale, *at
        return attend(size, given.precision, *arrays)

    with jax.named_scope(name):
        *axes, _ = mesh_axes.spec(heads[0])
        run = mesh_axes.placed(run, heads[0], PartitionSpec(*axes, None), PartitionSpec(*axes))
        scale = jnp.asarray(given.scale, dtypes.wide(*heads))
        ids = given.segments and given.segments[0]
        out, lse = run(*heads, *selection, given.key_lengths, ids, scale)
    present = valid(given.query_lengths, ids, query.shape[-3])
    out, lse = attention.clear_rows(out, lse, present)
    return attention.results(checkpoint_name(out, name), lse, given)


@declared
def sampled_block_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    selection_query: jax.Array,
    selection_key: jax.Array,
    block_size: int,
    top_k: int,
    rng: jax.Array,
    **options: Unpack[Sampling],
) -> tuple[jax.Array, jax.Array]:
    r"""Attention to blocks drawn from the policy of a selector, for training by policy gradient.

    The scores s_in are those of `learned_block_attention`, which takes the blocks with the largest
    scores. Here a query draws its top_k - 1 earlier blocks one by one, without replacement,

        P(n) = exp(s_in) / sum_m exp(s_im)    over the earlier blocks m that are not drawn yet.

    The output has no gradient for the selection. The logarithm of the probability of the drawn
    blocks has one, for REINFORCE (Williams 1992, "Simple Statistical Gradient-Following
    Algorithms"): see `effattn.nn.policy_loss`. Time and memory are those of
    `learned_block_attention`.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`.
      value: `(*B, T, K, Hv)`.
      selection_query: p, `(*B, T, K, Hs)`.
      selection_key: r, `(*B, T, K, Hs)`.
      block_size: b, tokens in a block.
      top_k: blocks of a query, its own block included.
      rng: a `jax.random` key.
      **options: padding, packing, scale and precision: see `effattn.options`.

    Returns:
      The output `(*B, T, N, Hv)`, and the log-probability of the blocks of each query and key head,
      `(*B, T, K)`, at least float32, 0 for padding.

    Raises:
      ValueError: wrong shapes of the selection; and the errors of `effattn.options`.
    """
    name = "sampled_block_attention"
    rng = checks.key("rng", rng)
    given, size, top_k, heads, selection = _checked(
        name, (query, key, value), (selection_query, selection_key), block_size, top_k, options
    )

    def run(heads, selection, lengths, ids, scale, rng):
        heads, sums, at = _placed(size, heads, selection[1], lengths, ids)
        rngs = jax.random.split(rng, (*heads[1].shape[:-3], heads[1].shape[-2]))
        blocks, logs = sample(size, top_k, selection[0], rngs, sums, *at)
        no_gates = jnp.zeros(blocks.shape, logs.dtype)
        arrays = *heads, blocks, no_gates, scale, *at
        return attend(size, given.precision, *arrays)[0], logs

    with jax.named_scope(name):
        *axes, _ = mesh_axes.spec(heads[0])
        run = mesh_axes.placed(run, heads[0], PartitionSpec(*axes, None), PartitionSpec(*axes))
        scale = jnp.asarray(given.scale, dtypes.wide(*heads))
        ids = given.segments and given.segments[0]
        out, logs = run(heads, selection, given.key_lengths, ids, scale, rng)
    present = valid(given.query_lengths, ids, query.shape[-3])
    if present is not None:
        out = jnp.where(present[..., None, None], out, 0)
        logs = jnp.where(present[..., None], logs, 0)
    return checkpoint_name(out, name), logs


def _checked(name, heads, selection, block_size, top_k, options):
    """Checked options and sizes, and the arrays with zeros in the padding."""
    query, key, value = heads
    document_blocks.one_array(options.get("segment_ids"), query.shape[:-2])
    given = attention.check(name, query, key, value, is_causal=True, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    size, top_k = check_options(block_size, top_k, query.shape[-3])
    shape = (*key.shape[:-1], max((1, *jnp.shape(selection[0])[-1:])))
    named = zip(("selection_query", "selection_key"), selection, strict=True)
    of_query, of_key = (checks.shaped(n, x, shape) for n, x in named)
    heads = attention.without_padding(query, key, value, given)
    selection = attention.without_padding(of_query, of_key, value, given)[:2]
    return given, size, top_k, heads, selection


def _placed(size, heads, selection_key, lengths, ids) -> tuple[Any, jax.Array, Any]:
    """Query, and key and value moved into blocks, and what `choose` reads.

    Returns:
      The heads; the sums of blocks; and the positions of the queries, int32 `(*B, T)`, the number
      of valid places, int32 `(*B)`, and the reach of packed documents, or None.
    """
    query, key, value = heads
    length, batch = query.shape[-3], query.shape[:-3]
    if ids is None or not length:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), query.shape[:-2])
        limits = jnp.full(batch, length, jnp.int32)
        limits = limits if lengths is None else jnp.minimum(lengths, limits)
        return heads, block_sums(selection_key, size), (positions, limits, None)
    blocks = document_blocks.blocks_of(ids, size)
    reach = document_blocks.reach_of(blocks, ids, lengths)
    heads = query, blocks.gather(key), blocks.gather(value)
    of_main = jnp.where(blocks.is_main[..., None, None], blocks.gather(selection_key), 0)
    limits = jnp.full(batch, blocks.token.shape[-1], jnp.int32)
    return heads, block_sums(of_main, size), (blocks.place, limits, reach)


def choose(
    size: int,
    top_k: int,
    selection_query: jax.Array,
    sums: jax.Array,
    positions: jax.Array,
    limits: jax.Array,
    documents: Reach | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The own block of each query and the blocks with the largest scores.

    Args:
      size: b, tokens in a block.
      top_k: k, blocks of a query.
      selection_query: `(*B, T, K, Hs)`.
      sums: `(*B, n, K, Hs)`, from `block_sums`; blocks that are not over are not read.
      positions: int32 `(*B, T)`, position of each query among the keys.
      limits: int32 `(*B)`, valid keys.
      documents: packed documents; None for one document a row.

    Returns:
      Blocks, int32 `(*B, T, K, k)`, -1 for none, and their soft gates.
    """

    def gated(scores, is_past, _):
        ranked = lax.stop_gradient(jnp.where(is_past, scores, dtypes.lowest(scores.dtype)))
        chosen = chosen_blocks.largest(ranked, top_k - 1)
        # A product in place of a gather, whose gradient would be a scatter.
        is_chosen = chosen[..., None] == jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None]
        picked = jnp.einsum(
            "tkn,tn->tk", is_chosen.astype(scores.dtype), scores, precision="highest"
        )
        gates = jnp.where(chosen < 0, 0, jax.nn.sigmoid(picked))
        return chosen, jnp.pad(gates, ((0, 0), (1, 0)))

    def head(query, sums, positions, limit, documents):
        return _scored(gated, query, sums, positions, limit, documents, size)

    head = jax.vmap(head, (-2, -2, None, None, None), (-2, -2))
    head = over_batch(head, positions.ndim - 1)
    return head(selection_query, sums, positions, limits, documents)


def sample(
    size: int,
    top_k: int,
    selection_query: jax.Array,
    rngs: jax.Array,
    sums: jax.Array,
    positions: jax.Array,
    limits: jax.Array,
    documents: Reach | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The own block of each query, and earlier blocks drawn without replacement.

    Arguments are those of `choose`, and `rngs`, `jax.random` keys `(*B, K)`.

    Returns:
      Blocks, int32 `(*B, T, K, k)`, -1 for none, and their log-probabilities `(*B, T, K)`.
    """

    def head(query, rng, sums, positions, limit, documents):
        every = jnp.arange(len(sums), dtype=jnp.int32)

        def drawn(scores, is_past, positions):
            def noise_at(position):
                return jax.random.gumbel(jax.random.fold_in(rng, position), every.shape)

            # The largest of scores with Gumbel noise are draws without replacement, in this order.
            noisy = lax.stop_gradient(scores) + jax.vmap(noise_at)(positions).astype(scores.dtype)
            lowest = dtypes.lowest(scores.dtype)
            chosen = chosen_blocks.largest(jnp.where(is_past, noisy, lowest), top_k - 1)

            def add(carry, block):
                logs, is_left = carry
                is_block = block[:, None] == every[None]
                rest = jax.nn.logsumexp(jnp.where(is_left, scores, lowest), -1)
                own = jnp.where(is_block, scores, 0).sum(-1)
                logs = logs + jnp.where(block < 0, 0, own - rest)
                return (logs, is_left & ~is_block), None

            start = mesh_axes.vary_like(scores, jnp.zeros(len(scores), scores.dtype)), is_past
            (logs, _), _ = lax.scan(add, start, chosen.T)
            return chosen, logs

        return _scored(drawn, query, sums, positions, limit, documents, size)

    head = jax.vmap(head, (-2, 0, -2, None, None, None), (-2, -1))
    head = over_batch(head, positions.ndim - 1)
    return head(selection_query, rngs, sums, positions, limits, documents)


def _scored(choose, query, sums, positions, limit, documents, size):
    """Own and chosen blocks of the queries `(T, Hs)` of one head, int32 `(T, k)`, and a result.

    `choose` takes scores `(t, n)`, bool `(t, n)` for the earlier blocks, and positions `(t,)`; it
    returns blocks `(t, k - 1)` and the result, `(t, ...)`.
    """
    blocks = jnp.arange(len(sums), dtype=jnp.int32)
    counts, first = jnp.clip(limit - blocks * size, 0, size), jnp.zeros_like(positions)
    if documents is not None:
        counts, first = documents.counts, documents.first
    means = sums / jnp.maximum(counts, 1).astype(sums.dtype)[:, None]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tile(x):
        query, positions, first = x
        own, first = (place[:, None] // size for place in (positions, first))
        scores = jnp.einsum("th,nh->tn", query.astype(sums.dtype), means, precision="highest")
        is_past = (blocks[None] >= first) & (blocks[None] < own) & (counts > 0)[None]
        chosen, result = choose(scores / math.sqrt(means.shape[-1]), is_past, positions)
        return jnp.concatenate([own, chosen], 1), result

    return folding.in_tiles_of_queries(tile, (query, positions, first), max(size, _QUERIES))


def attend(
    size: int,
    precision: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    blocks: jax.Array,
    gates: jax.Array,
    scale: float | jax.Array,
    positions: jax.Array,
    limits: jax.Array,
    documents: Reach | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to the chosen blocks.

    Args:
      size: b, tokens in a block.
      precision: of the products.
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`, zeros in the padding.
      value: `(*B, S, K, Hv)`, likewise.
      blocks: int32 `(*B, T, K, k)`, different blocks for each query; -1 for none.
      gates: `(*B, T, K, k)`; their value changes nothing, and they have a gradient.
      scale: multiplies the logits.
      positions: int32 `(*B, T)`, position of each query among the keys.
      limits: int32 `(*B)`, valid keys.
      documents: packed documents; None for one document a row.

    Returns:
      Output `(*B, T, N, Hv)` and log-sum-exp `(*B, T, N)`; `dtypes.lowest` for an empty row.
    """
    *batch, length, heads, _ = query.shape
    if 0 in (*batch, length, key.shape[-3]):
        dtype = dtypes.wide(query, key, value)
        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
        return out, jnp.full(query.shape[:-1], dtypes.lowest(dtype), dtype)

    def head(query, key, value, blocks, gates, positions, limit, documents):
        last, first = jnp.minimum(positions, limit - 1), None
        if documents is not None:
            first, last = documents.first, jnp.minimum(last, documents.last)
        how = {"block_size": size, "scale": scale, "precision": precision, "first": first}

        def of_block(blocks):
            return chosen_blocks.attend(query, key, value, blocks[:, None], last, **how)

        outs, lses = jax.vmap(of_block, 1)(blocks)  # (k, T, G, Hv) and (k, T, G)
        logs = (gates - lax.stop_gradient(gates)).astype(lses.dtype).T[..., None]
        lses = jnp.where(lses == dtypes.lowest(lses.dtype), lses, lses + logs)
        return combine(tuple(outs), tuple(lses))

    # Map over key heads, then over batch dimensions.
    head = jax.vmap(head, (-3, *[-2] * 4, *[None] * 3), (-3, -2))
    head = over_batch(head, len(batch))
    key_heads = key.shape[-2]
    query = query.reshape(*batch, length, key_heads, heads // key_heads, -1)
    out, lse = head(query, key, value, blocks, gates, positions, limits, documents)
    shape = *batch, length, heads
    return out.reshape(*shape, value.shape[-1]), lse.reshape(shape)


registry.register(
    registry.Mechanism(
        name="learned_blocks",
        family="sparse",
        paper="Gao et al. 2024, SeerAttention: Learning Intrinsic Sparse Attention in Your LLMs",
        function=learned_block_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.learned_blocks:LearnedBlockSelfAttention",
        decoder="effattn.decode.learned_blocks:LearnedBlockDecoder",
        options={"block_size": 64, "top_k": 3},
        options_at=lambda length: {"block_size": math.isqrt(length), "top_k": 3},
        complexity="O(N (k b + N / b)), O(N sqrt N) at best",
        time_exponent=1.5,
        causality="rounding",
    )
)
