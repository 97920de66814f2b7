"""Shared arguments and call path of softmax attention, on top of the block-attention core."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from effattn import dispatch
from effattn.arrays import checks, dropout, dtypes, mesh_axes
from effattn.arrays.combine import combine
from effattn.arrays.segments import both, valid
from effattn.cores import block_attention, sequence_parts
from effattn.cores.score_mod import Then, without_closure
from effattn.dispatch.partition import places_of
from effattn.interfaces.block_attention import Config, Inputs, Origin
from effattn.options import ScoreMod
from effattn.patterns.layouts import BlockLayout, KnownLayout
from effattn.xla import block_rows, cudnn, tiling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Checked arguments of a softmax mechanism, except query, key and value.

    The fields from `origin` on are set by mechanisms only; `Config` and `Inputs` in
    `effattn.interfaces.block_attention` document them. `by_cudnn` adds the implementation "cudnn".
    `results` are the output and the log-sum-exp over all keys, if the keys of this call are only a
    part of them (`block_attention.known_attention`).
    """

    bias: jax.Array | None
    mask: jax.Array | None
    scale: float | jax.Array
    is_causal: bool
    query_offset: int | jax.Array
    query_lengths: jax.Array | None
    key_lengths: jax.Array | None
    segments: tuple[jax.Array, jax.Array] | None
    window: tuple[int | None, int | None] | None
    soft_cap: float | None
    score_mod: ScoreMod | None
    sink: jax.Array | None
    dropout_rate: float
    dropout_rng: jax.Array | None
    precision: jax.lax.PrecisionLike
    tile: tuple[int, int] | None
    mechanism: str
    implementation: str | tuple[str, ...] | None
    return_residual: bool = False
    origin: Origin | None = None
    positions: tuple[jax.Array, jax.Array] | None = None
    pattern: Any = None
    layout: BlockLayout | None = None
    additive: jax.Array | None = None
    activation: str | None = None
    by_cudnn: bool = False
    results: tuple[jax.Array, jax.Array] | None = None


def check(
    mechanism: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    implementation: str | tuple[str, ...] | None = None,
    bias: Any = None,
    mask: Any = None,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_offset: Any = 0,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    local_window_size: Any = None,
    logits_soft_cap: float | None = None,
    score_mod: ScoreMod | None = None,
    sink: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    tile: Any = None,
    return_residual: bool = False,
) -> Arguments:
    """Validates the arguments of `dot_product_attention` (see `effattn.options`).

    `mechanism` is the name of the calling function, for error messages.

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
    """
    dispatch.requested(implementation)
    if score_mod is not None:
        checks.accepts("score_mod", score_mod, ("logit", "b", "h", "i", "j"))
    batch = checks.query_key_value(query, key, value)
    heads, queries, keys = query.shape[-2], query.shape[-3], key.shape[-3]
    pairs = (*batch, heads, queries, keys)
    if bias is not None:
        bias = checks.broadcastable("bias", bias, pairs)
        if jnp.issubdtype(bias.dtype, jnp.integer):
            bias = bias.astype(dtypes.wide(query.dtype))
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(
                f"bias must be floating point or integers, got dtype {bias.dtype}; pass bools as "
                "mask"
            )
    if mask is not None:
        mask = checks.broadcastable("mask", mask, pairs)
        if mask.dtype != jnp.bool_:
            raise ValueError(
                f"mask must be bool, True where a pair may attend, got dtype {mask.dtype}; an "
                "additive mask is a bias: pass it as bias"
            )
    return Arguments(
        bias=bias,
        mask=mask,
        scale=checks.scale(scale, query.shape[-1]),
        is_causal=is_causal,
        query_offset=checks.offset(query_offset, batch),
        query_lengths=checks.lengths("query_seq_lengths", query_seq_lengths, batch),
        key_lengths=checks.lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        segments=checks.segment_ids(segment_ids, batch, queries, keys),
        window=None if local_window_size is None else checks.window(local_window_size),
        soft_cap=checks.soft_cap(logits_soft_cap),
        score_mod=score_mod,
        sink=None if sink is None else checks.shaped("sink", sink, (heads,)),
        dropout_rate=checks.dropout_rate(dropout_rate, dropout_rng),
        dropout_rng=dropout_rng,
        precision=precision,
        tile=checks.tile(tile),
        mechanism=mechanism,
        implementation=implementation,
        return_residual=return_residual,
    )


def check_by_rows(
    mechanism: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    query_tile: Any = None,
    **options: Any,
) -> Arguments:
    """Validates the arguments of a function with the options of `effattn.options.ByRows`."""
    given = check(mechanism, query, key, value, **options)
    if query_tile is None:
        return given
    queries = checks.at_least("query_tile", query_tile, 1, "queries, or None")
    return dataclasses.replace(given, tile=(queries, max(key.shape[-3], 1)))


def results(out: jax.Array, lse: jax.Array, given: Arguments) -> Any:
    """The output, or `(output, log-sum-exp)` with `return_residual`."""
    return (out, dtypes.logarithms(lse)) if given.return_residual else out


def _core_call(query, key, value, given: Arguments) -> tuple[Config, Inputs, jax.Array | None]:
    """Configuration and inputs of the core, and the mask of the valid queries."""
    *batch, queries, heads, _ = query.shape
    sequence_parts.refuse(given.mechanism)
    keys, key_heads = key.shape[-3:-1]
    by_group = (key_heads, heads // key_heads)

    key_mask, mask = valid(given.key_lengths, None, keys), given.mask
    if mask is not None and mask.shape[-2] == mask.shape[-3] == 1:
        of_keys = jnp.broadcast_to(mask[..., 0, 0, :], (*batch, keys))
        key_mask, mask = both(key_mask, of_keys), None
    query_mask = _present_queries(queries, given)
    query, key, value = without_padding(query, key, value, given, key_mask)
    left, right = given.window or (None, None)
    if given.is_causal:
        right = 0
    offset, scale, rng = given.query_offset, given.scale, given.dropout_rng
    score_mod, constants = None, ()
    if given.score_mod is not None:
        score_mod, constants = without_closure(given.score_mod, (query, key, value))
    rows, layout = tiling.known_product(batch) * heads, given.layout
    config = Config(
        tile=given.tile if layout is None else layout.tile,
        scale=scale if isinstance(scale, float) else None,
        left=left,
        right=right,
        offset=offset if isinstance(offset, int) else None,
        soft_cap=given.soft_cap,
        score_mod=score_mod,
        dropout_rate=given.dropout_rate,
        precision=given.precision,
        pattern=given.pattern,
        key_tiles=1 if layout is None else tiling.choose_width(layout, max(rows, 1)),
        origin=given.origin,
        activation=given.activation,
    )
    operands = Inputs(
        query=query,
        key=key,
        value=value,
        bias=_split_heads(_bias_without_padding(given, queries, keys), by_group),
        scale=None if isinstance(scale, float) else scale,
        additive=given.additive,
        constants=constants,
        mask=_split_heads(mask, by_group),
        key_mask=key_mask,
        segments=given.segments,
        offset=None if isinstance(offset, int) else offset,
        seed=dropout.seed_from_rng(rng) if given.dropout_rate and rng is not None else None,
        positions=given.positions,
        layout=layout,
    )
    return config, operands, query_mask


def call_of(query: jax.Array, key: jax.Array, value: jax.Array, given: Arguments) -> dispatch.Call:
    """Description of the call that `attend` makes."""
    config, operands, _ = _core_call(query, key, value, given)
    return block_attention.call(given.mechanism, config, operands)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, given: Arguments
) -> tuple[jax.Array, jax.Array]:
    """Runs softmax attention: the output `(*B, T, N, Hv)` and the log-sum-exp `(*B, T, N)`.

    The log-sum-exp of a row without keys is `dtypes.lowest`, and the output of the row is zero.
    """
    whole = query, key, value
    config, operands, query_mask = _core_call(*whole, given)
    call = block_attention.call(given.mechanism, config, operands)
    if given.by_cudnn:
        refusal = functools.partial(cudnn.refusal, *whole, given)
        call = call.with_implementation("cudnn", refusal, cudnn.LIMITS)
    chosen = dispatch.choose(given.implementation, call, places_of(query))
    if "cudnn" in chosen.names:
        # cuDNN accepts calls on machines with a GPU only, so a GPU kernel before it runs instead.
        if next(n for n in chosen.names if dispatch.PLATFORMS[n] in ("cuda", None)) == "cudnn":
            return cudnn.attend(*whole, given)
        chosen = chosen._replace(names=tuple(n for n in chosen.names if n != "cudnn"))
    config = dataclasses.replace(config, implementations=chosen)
    layout, for_kernels = operands.layout, not {*chosen.names}.isdisjoint(dispatch.TILED)
    if layout is not None and for_kernels and not layout.is_traced:
        # Transposed here, in NumPy: within the program the number of listed tiles is not known.
        operands = operands._replace(layout_of_keys=layout.transpose())
    if "llvm" in chosen.names:
        config = dataclasses.replace(config, known_layout=_known_layout(config, operands))
    *axes, _ = mesh_axes.spec(query)
    specs = PartitionSpec(*axes, None), PartitionSpec(*axes)
    core: Any = block_attention.block_attention
    if given.results is not None:
        core = block_attention.known_attention
    run = mesh_axes.placed(functools.partial(core, config), query, *specs)
    out, lse = run(operands, *(given.results or ()))
    if given.sink is not None:
        out, lse = with_sink(out, lse, given.sink)
    return clear_rows(out, lse, query_mask)


def _known_layout(config: Config, x: Inputs) -> KnownLayout | None:
    """The layout of a call, or that of its pattern; None if all pairs may attend."""
    layout, lengths = x.layout, (x.query.shape[-3], x.key.shape[-3])
    if layout is None and config.pattern is not None and 0 not in lengths:
        tile = tiling.choose_sparse_tile(lengths)
        layout = config.pattern.layout(
            *lengths, tile=tile, offset=config.offset, key_heads=x.key.shape[-2]
        )
    return None if layout is None else KnownLayout(layout)


def attend_by_rows(
    weigh: block_rows.Weigh,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    given: Arguments,
    *arrays: jax.Array,
) -> jax.Array:
    """Attention whose weights are a function of all logits of a query: `(*B, T, N, Hv)`.

    `weigh` and its `arrays` are those of `effattn.xla.block_rows`.
    """
    config, operands, query_mask = _core_call(query, key, value, given)
    with jax.named_scope(given.mechanism):
        *axes, _ = mesh_axes.spec(query)
        core = functools.partial(block_rows.attend, config, weigh)
        (out,) = mesh_axes.placed(core, query, PartitionSpec(*axes, None))(operands, *arrays)
    return _zero_where_absent(out, query_mask)


def clear_rows(
    out: jax.Array, lse: jax.Array, present: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Clears rows: where `present (*B, T)` is False, the results are those of rows without keys."""
    if present is not None:
        lse = jnp.where(present[..., None], lse, dtypes.lowest(lse.dtype))
    return _zero_where_absent(out, present), lse


def attend_elementwise(
    activation: str, query: jax.Array, key: jax.Array, value: jax.Array, given: Arguments, **affine
) -> jax.Array:
    """Attention with `Config.activation` of the logits in place of the softmax.

    The logits pass through `Then(**affine)` first.
    """
    score_mod = Then(given.score_mod, **affine)
    given = dataclasses.replace(given, score_mod=score_mod, activation=activation)
    with jax.named_scope(given.mechanism):
        return attend(query, key, value, given)[0]


def without_padding(
    query: jax.Array, key: jax.Array, value: jax.Array, given: Arguments, key_mask: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value with zeros in the padding, so that a NaN there reaches no gradient."""
    query_mask = _present_queries(query.shape[-3], given)
    present = both(key_mask, _present_keys(key.shape[-3], given))
    return (
        _zero_where_absent(query, query_mask),
        _zero_where_absent(key, present),
        _zero_where_absent(value, present),
    )


def ids_of_valid(given: Arguments, batch: Sequence[int], length: int) -> list[jax.Array]:
    """Segment ids of queries and keys, `(*B, T)` each; 0 in the padding, and 1 without packing."""
    ones = jnp.ones((*batch, length), jnp.int32)
    present = (valid(x, None, length) for x in (given.query_lengths, given.key_lengths))
    return [
        ids if there is None else jnp.where(there, ids, 0)
        for ids, there in zip(given.segments or (ones, ones), present, strict=True)
    ]


def _bias_without_padding(given, queries, keys):
    """The bias with zeros at rows and columns that are padding in all examples that share them."""
    bias = given.bias
    if bias is None:
        return None
    for axis, present in ((-2, _present_queries(queries, given)), (-1, _present_keys(keys, given))):
        if present is None or bias.shape[axis] == 1:
            continue
        shared = tuple(n for n, size in enumerate(bias.shape[:-3]) if size == 1)
        present = jnp.expand_dims(present.any(shared, keepdims=True), (-2, -3))
        bias = jnp.where(jnp.swapaxes(present, axis, -1), bias, 0)
    return bias


def _present_queries(queries, given):
    """Mask of the valid queries, bool `(*B, T)`; None if all are valid."""
    return valid(given.query_lengths, given.segments and given.segments[0], queries)


def _present_keys(keys, given):
    """Mask of the valid keys, bool `(*B, S)`; None if all are valid."""
    return valid(given.key_lengths, given.segments and given.segments[1], keys)


def _zero_where_absent(array, present):
    """Sets `(*B, L, heads, H)` and its gradient to zero where `present (*B, L)` is False."""
    return array if present is None else jnp.where(present[..., None, None], array, 0)


def _split_heads(array, by_group):
    """Reshapes `(*#B, #N, #T, #S)` to `(*#B, #K, #G, #T, #S)`."""
    if array is None:
        return None
    *batch, heads, queries, keys = array.shape
    return array.reshape(*batch, *(by_group if heads > 1 else (1, 1)), queries, keys)


def with_sink(out: jax.Array, lse: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds the sink to the softmax: one more logit, whose value is zero."""
    sink = jnp.broadcast_to(sink.astype(lse.dtype), lse.shape)
    return combine((out, jnp.zeros_like(out)), (lse, sink))
