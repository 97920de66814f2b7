"""Sparse Sinkhorn attention: to the own block, and to a mix of blocks from a soft permutation."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import fold, unfold
from effattn.arrays.segments import within
from effattn.cores import attention, feature_attention, folding
from effattn.naive import masked_softmax, over_pairs, with_naive
from effattn.options import Execution, Padding, Scale, Tile, declared

# Lower than any logit; sums of such numbers do not overflow.
_LOWEST = -1e30


class Options(Padding, Scale, Tile, Execution, total=False):
    """The shared options of `sinkhorn_attention`."""


def naive(
    query, key, value, pairs, *, sort_projection, scale, block_size, num_iterations, temperature
):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, sort projection `(M, H)`."""
    blocks, own = -(-len(key) // block_size), pairs.i // block_size
    members = pairs.present & (pairs.j // block_size == jnp.arange(blocks)[:, None])  # (n, T)
    exists = members.any(1)
    both = exists[:, None] & exists
    with jax.default_matmul_precision("highest"):
        sums = members.astype(key.dtype) @ key
        logs = sums @ sort_projection[:blocks].T / temperature
    for _ in range(num_iterations):
        for axis in (1, 0):  # first the rows, then the columns
            logs -= jax.nn.logsumexp(jnp.where(both, logs, _LOWEST), axis, keepdims=True)
    sorting = jnp.where(both, jnp.exp(jnp.where(both, logs, 0)), 0)  # (n, n)

    # The token at each place of each block, one-hot: (n, b, T).
    is_at = members[:, None] & (pairs.j % block_size == jnp.arange(block_size)[:, None])
    read = jnp.einsum("uv,vpt->upt", sorting, is_at.astype(sorting.dtype))[own]  # (T, b, T)
    logits = jnp.einsum("th,tps,sh->tp", scale * query, read, key)
    weights = masked_softmax(logits, exists[own][:, None] & is_at.any((0, 2)))
    is_own = pairs.where(own[:, None] == pairs.j // block_size)
    local, _ = is_own.softmax(scale * query @ key.T)
    return local @ value + jnp.einsum("tp,tps,sd->td", weights, read, value)


@with_naive(over_pairs(naive, per_head={"sort_projection": 2}, is_causal=False, wide=True))
@declared
def sinkhorn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    sort_projection: jax.Array,
    block_size: int,
    num_iterations: int = 7,
    temperature: float = 0.75,
    **options: Unpack[Options],
) -> Any:
    r"""Sparse Sinkhorn attention (Tay et al. 2020, "Sparse Sinkhorn Attention").

    Blocks have b tokens. A soft permutation S of the n blocks of each key head mixes their keys and
    values, place by place, and a query attends to its own block and to the mix for its block:

        R_uv = w_v . sum(k_j for j in block u) / temperature
        S = sinkhorn(R);    K'_u = sum_v S_uv K_v;    V'_u = sum_v S_uv V_v
        out_t = softmax(scale * K_u q_t) V_u + softmax(scale * K'_u q_t) V'_u,   t in block u

    `sinkhorn` takes the exponentials of R, and then divides each row and after that each column by
    its sum, `num_iterations` times, so that S approaches a matrix whose rows and columns sum to 1.
    A lower temperature brings S nearer to a permutation. The causal form of the paper, which masks
    these sums, is not implemented: with sums of columns over the blocks of all queries, later
    queries change earlier rows.

    Time O(T (b + T / b) (H + Hv)), that is O(T sqrt(T) (H + Hv)) for b near sqrt(T); memory
    O(T + (T / b)^2 J) for J iterations, forward and backward. Computed in at least float32.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      sort_projection: w, `(K, M, H)`, a vector for each of up to M blocks of each key head, or
        `(1, M, H)`. M is at least n.
      block_size: b, tokens in a block, 1 or more. T need not be a multiple of it.
      num_iterations: J, 1 or more.
      temperature: above 0.
      **options: padding, scale, tiles and execution: see `effattn.options`. Padded keys are in no
        sum and no mix, and blocks of padding alone take no part in the permutation. A place that a
        block lacks counts as zero in a mix. `precision` applies to products of tokens; those that
        make R have the highest.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`. Queries in blocks without keys give zeros.

    Raises:
      ValueError: more than M blocks; and the errors of `effattn.options`.
    """
    name = "sinkhorn_attention"
    given = attention.check(name, query, key, value, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    size = checks.at_least("block_size", block_size, 1, "tokens")
    iterations = checks.at_least("num_iterations", num_iterations, 1)
    temperature = checks.positive("temperature", temperature)
    projection = feature_attention.check_projection("sort_projection", sort_projection, key)
    length, blocks = query.shape[-3], math.ceil(query.shape[-3] / size)
    if blocks > projection.shape[1]:
        raise ValueError(
            f"sort_projection must have a vector for each of the {blocks} blocks of {size} of the "
            f"{length} tokens, got {projection.shape[1]}; pass more vectors, give a layer a "
            "larger max_length, or a larger block_size"
        )
    if not length:
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
    attend = functools.partial(_attend, size, iterations, temperature, given)
    with jax.named_scope(name):
        *axes, _ = mesh_axes.spec(query)
        run = mesh_axes.placed(attend, query, PartitionSpec(*axes, None))
        arrays = projection[:, :blocks], given.scale, given.query_lengths, given.key_lengths
        (out,) = run(query, key, value, *arrays)
    return checkpoint_name(out, name)


def _attend(size, iterations, temperature, given, query, key, value, projection, *options):
    """Attention to the own block and to the mix of blocks, as a tuple of one array."""
    scale, query_lengths, lengths = options
    given = dataclasses.replace(
        given, scale=scale, query_lengths=query_lengths, key_lengths=lengths
    )
    dtype, wide = value.dtype, dtypes.wide(query, key, value)
    arrays = attention.without_padding(query, key, value, given)
    query, key, value = (x.astype(wide) for x in arrays)
    axis, length = query.ndim - 3, query.shape[-3]
    blocks = math.ceil(length / size)
    queries, keys, values = (fold(x, size, axis) for x in (query, key, value))
    lengths = jnp.full(query.shape[:-3], length, jnp.int32) if lengths is None else lengths
    exists = within(-(-lengths // size), blocks)  # (*B, n)

    sums, vectors = keys.sum(axis + 1), projection.astype(wide)
    logits = feature_attention.products(sums, vectors, "highest") / temperature
    sorting = soft_permutation(jnp.moveaxis(logits, -2, -3), exists, iterations)

    def mixed(x):
        return jnp.einsum("...kuv,...vpkd->...upkd", sorting, x, precision=given.precision)

    places = jnp.where(exists, jnp.minimum(lengths, size)[..., None], 0)
    of_mix = dataclasses.replace(
        given,
        query_lengths=folding.fold_lengths(query_lengths, blocks, size),
        key_lengths=places,
    )
    local, _ = folding.attend_inside(size, query, key, value, given)
    sorted_blocks, _ = attention.attend(queries, mixed(keys), mixed(values), of_mix)
    sorted_blocks = unfold(sorted_blocks, length, axis)
    return ((local + sorted_blocks).astype(dtype),)


def soft_permutation(logits: jax.Array, exists: jax.Array, iterations: int) -> jax.Array:
    """Sinkhorn normalisation of exp(logits), by logarithms.

    Args:
      logits: `(*B, K, n, n)`.
      exists: bool `(*B, n)`, blocks that take part; the others have rows and columns of zeros.
      iterations: each one divides the rows by their sums, and then the columns.

    Returns:
      `(*B, K, n, n)`; columns sum to 1.
    """
    both = (exists[..., :, None] & exists[..., None, :])[..., None, :, :]

    def improve(logs, _):
        for axis in (-1, -2):
            total = jax.nn.logsumexp(jnp.where(both, logs, _LOWEST), axis, keepdims=True)
            logs = jnp.where(both, logs - total, 0)
        return logs, None

    logs, _ = lax.scan(improve, jnp.where(both, logits, 0), None, iterations)
    return jnp.where(both, jnp.exp(logs), 0)


def _blocks_at(length: int) -> Mapping[str, Any]:
    return {"block_size": math.isqrt(length)}


registry.register(
    registry.Mechanism(
        name="sinkhorn",
        family="sparse",
        paper="Tay et al. 2020, Sparse Sinkhorn Attention",
        function=sinkhorn_attention,
        capabilities=frozenset({"bidirectional"}),
        reasons={
            "causal": "a column of its sorting matrix is normalised over the blocks of all queries",
            "segments": "its blocks start at multiples of block_size, not with documents; pass one "
            "document a row",
        },
        options={"block_size": 64},
        options_at=_blocks_at,
        builder="effattn.nn.sinkhorn:SinkhornSelfAttention",
        complexity="O(N (b + N / b)), O(N sqrt N) at best",
        time_exponent=1.5,
    )
)
