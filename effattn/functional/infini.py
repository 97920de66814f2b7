"""Infini-attention: attention within segments, and a compressive memory of earlier segments."""

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from_segment_ids, valid
from effattn.cores import attention, compressive_memory
from effattn.cores.compressive_memory import Segments
from effattn.functional.linear import elu_features
from effattn.naive import dot, normalized, over_pairs, with_naive
from effattn.options import Execution, Packing, Padding, Scale, declared


class Options(Padding, Packing, Scale, Execution, total=False):
    """The shared options of `infini_attention`."""


Rotary = Callable[[jax.Array, jax.Array], jax.Array]


def naive(query, key, value, pairs, *, gate, segment_size, scale, delta_rule=False, rotary=None):
    """One head: query and key `(T, H)`, value `(T, Hv)`, gate `()`."""
    same_document = pairs.key_ids[:, None] == pairs.key_ids
    place = pairs.j - jnp.where(same_document, pairs.j, len(key)).min(1, initial=len(key))
    segment = place // segment_size
    is_earlier = segment < segment[:, None]
    turn = rotary or (lambda x, _: x)
    turned = [turn(x[:, None], place)[:, 0] for x in (query, key)]
    within = pairs.where(segment == segment[:, None])
    weights, _ = within.softmax(scale * dot(turned[0], turned[1].T))
    local = dot(weights, value)
    query, key, value = (x.astype(local.dtype) for x in (query, key, value))
    query, key = elu_features(query), elu_features(key)
    one = jnp.ones((len(key), 1), key.dtype)
    if delta_rule:
        products = jnp.where(is_earlier & same_document & pairs.present, key @ key.T, 0)

        def of_token(values, token):
            """Subtracts from a value what its key reads of the values before."""
            is_this, products = token
            read = normalized(products @ jnp.concatenate([values, one], 1))
            return values - is_this[:, None] * read, None

        value, _ = jax.lax.scan(of_token, value, (jnp.eye(len(key), dtype=value.dtype), products))
    products = jnp.where(pairs.allowed & is_earlier, query @ key.T, 0)
    memory = normalized(products @ jnp.concatenate([value, one], 1))
    share = jax.nn.sigmoid(gate.astype(local.dtype))
    return share * memory + (1 - share) * local


@with_naive(over_pairs(naive, per_head={"gate": 0}))
@declared
def infini_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    gate: jax.Array,
    segment_size: int,
    delta_rule: bool = False,
    rotary: Rotary | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Infini-attention (Munkhdalai et al. 2024, "Leave No Context Behind").

    A segment has L tokens. A token attends to its segment up to itself, and reads a memory of all
    earlier segments by linear attention with the features f(x) = elu(x) + 1:

        A_mem = f(q) M / (f(q) . z),   A_dot = causal softmax attention in the segment
        out = sigmoid(g) A_mem + (1 - sigmoid(g)) A_dot

    At the end of a segment each of its tokens adds f(k) v^T to M and f(k) to z. With the delta
    rule, it adds f(k) (v - f(k) M / (f(k) . z))^T, with the M and z from before the segment. A_mem
    is zero in the first segment. Always causal. A gate of -inf gives attention within segments.

    Time O(T (L + H) Hv), memory O(T + (T / L) H Hv), forward and backward.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      gate: g, `(N,)`, or `()` for all heads.
      segment_size: L, tokens in a segment, counted from the start of the document.
      delta_rule: whether the memory is updated by the delta rule.
      rotary: rotary embedding `(x (*B, T, heads, H), positions (*B, T)) -> x` of queries and keys
        in A_dot alone, as in the paper; positions are those in the document.
      **options: padding, packing, scale of A_dot, and execution: see `effattn.options`.
        `implementation` chooses that of A_dot.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.

    Raises:
      ValueError: wrong shapes, dtypes or values; and the errors of `effattn.options`.
    """
    name = "infini_attention"
    given = attention.check(name, query, key, value, is_causal=True, **options)
    checks.self_attention(name, query, key)
    checks.known_length(name, query)
    size, gate = check_options(segment_size, gate, query.shape[-2])
    if rotary is not None:
        checks.accepts("rotary", rotary, ("x", "positions"))
    *batch, time, _, _ = query.shape
    reason = "each token is both query and key"
    checks.one_segment_array(options.get("segment_ids"), (*batch, time), reason)
    ids = None if given.segments is None else given.segments[0]
    if ids is None:
        place = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (*batch, time))
        number = place // size
    else:
        place = positions_from_segment_ids(ids)
        number = jnp.cumsum(place % size == 0, -1, dtype=jnp.int32)
    present = valid(given.key_lengths, ids, time)
    present = jnp.ones((*batch, time), bool) if present is None else present
    segments = Segments(number, place < size, present)
    query, key, value = attention.without_padding(query, key, value, given)
    with jax.named_scope(name):
        of_local = number + 1 if ids is None else jnp.where(ids == 0, 0, number + 1)
        given = dataclasses.replace(given, segments=(of_local, of_local), window=(size - 1, 0))

        def turned(name, x):
            if rotary is None:
                return x
            return checks.shaped(f"rotary({name})", rotary(x, place), x.shape)

        heads = turned("query", query), turned("key", key), value
        local, _ = attention.attend(*heads, given)

        def remember(query, key, value, segments):
            wide = dtypes.wide(query, key, value)
            sizes = key.shape[-2], key.shape[-1], value.shape[-1]
            memory = compressive_memory.empty(tuple(batch), *sizes, wide)
            before = jnp.full(batch, -1, jnp.int32)
            found, _ = compressive_memory.read(
                query,
                key,
                value,
                segments,
                memory,
                before,
                segment_size=size,
                delta_rule=delta_rule,
                precision=given.precision,
            )
            return (found,)

        *axes, _ = mesh_axes.spec(query)
        (memory,) = mesh_axes.placed(remember, query, PartitionSpec(*axes, None))(
            query, key, value, segments
        )
        out = mixed(gate, memory, local)
    valid_queries = valid(given.query_lengths, ids, time)
    return out if valid_queries is None else jnp.where(valid_queries[..., None, None], out, 0)


def check_options(segment_size: Any, gate: Any, heads: int) -> tuple[int, jax.Array]:
    """Returns the checked number of tokens in a segment, and the gates `(N,)`."""
    size = checks.at_least("segment_size", segment_size, 1, "tokens")
    gate = checks.shaped("gate", gate, (heads,) if jnp.ndim(gate) else ())
    return size, jnp.broadcast_to(gate, (heads,))


def mixed(gate: jax.Array, memory: jax.Array, local: jax.Array) -> jax.Array:
    """The mix of both attentions by the gates `(N,)`, in the dtype of `local`."""
    wide = dtypes.wide(memory, local)
    share = lead(jax.nn.sigmoid(gate.astype(wide))[:, None], local.ndim)
    return (share * memory.astype(wide) + (1 - share) * local.astype(wide)).astype(local.dtype)


registry.register(
    registry.Mechanism(
        name="infini",
        family="hybrid",
        paper="Munkhdalai et al. 2024, Leave No Context Behind: Efficient Infinite Context "
        "Transformers with Infini-attention",
        function=infini_attention,
        capabilities=frozenset({"causal"}),
        reasons={"bidirectional": "its memory holds earlier segments"},
        builder="effattn.nn.infini:InfiniSelfAttention",
        decoder="effattn.decode.infini:InfiniDecoder",
        options={"segment_size": 64},
        complexity="O(N (L + H) H)",
        time_exponent=1.0,
    )
)
