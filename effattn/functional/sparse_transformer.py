"""The factorised attention of Sparse Transformers, strided and fixed."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.combine import combine
from effattn.cores import attention, folding
from effattn.cores.attention import ScoreMod
from effattn.functional import sliding_window

KINDS, FACTORS = ("strided", "fixed"), ("merged", "first", "second")


@checks.checked
def sparse_transformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    stride: int,
    kind: str = "strided",
    summary: int = 1,
    factor: str = "merged",
    scale: float | jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    logits_soft_cap: float | None = None,
    score_mod: ScoreMod | None = None,
    sink: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    tile: tuple[int, int] | None = None,
    implementation: str | tuple[str, ...] | None = None,
    return_residual: bool = False,
) -> Any:
    r"""Factorised causal attention (Child et al. 2019, "Sparse Transformers").

    For a stride l, a query at position i attends to the keys at positions j <= i of

        strided    first {j : i - j <= l},              second {j : (i - j) mod l = 0}
        fixed      first {j : floor(j/l) = floor(i/l)}, second {j : j mod l >= l - c}

    with c = `summary`. "merged" is their union, the paper's merged head; "first" and "second" are
    one of them, for heads or layers that take turns. The strided second factor is computed in the
    l residue classes of positions, the fixed ones in blocks and over the summary tokens alone.

    Time O(T (l + T / l) (H + Hv)) strided and O(T (l + c T / l) (H + Hv)) fixed, so O(T sqrt(T))
    for l near sqrt(T); memory O(T), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      stride: l, tokens, 1 or more.
      kind: "strided" or "fixed".
      summary: c, the last tokens of a block that later blocks see, 1 to l; of "fixed" alone.
      factor: "merged", "first" or "second".
      scale: default H**-0.5. May be an array, with a gradient.
      query_seq_lengths: int `(*B)`; rows from there on give zeros.
      key_value_seq_lengths: int `(*B)`; keys from there on are padding.
      segment_ids: int `(*B, T)`, or a pair of them; 0 is padding. For "strided", whose pattern
        depends on distances alone.
      logits_soft_cap: c > 0; logits become c * tanh(logits / c).
      score_mod: `(logit, b, h, i, j) -> logit` on scalars, as in `effattn.dot_product_attention`.
      sink: `(N,)`, a logit a head that takes part in the softmax and has no value.
      dropout_rate: share of the weights dropped, in [0, 1).
      dropout_rng: a `jax.random` key; needed where the rate is above 0.
      precision: of the matrix products, as in `jax.lax.dot`.
      tile: queries and keys in a tile; tuning only.
      implementation: None, a name, or a tuple of names tried in order, as in
        `effattn.dot_product_attention`; `effattn.support("sparse_transformer")` lists the names and
        what they take.
      return_residual: also return the log-sum-exp.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
      TypeError: in forward-mode differentiation.
    """
    _check(stride, kind, summary, factor)
    if segment_ids is not None and kind == "fixed":
        raise ValueError(
            "segment_ids are for kind='strided'; kind='fixed' counts its blocks from the start of "
            "the sequence, not of each segment"
        )
    given = attention.check(
        "sparse_transformer_attention",
        query,
        key,
        value,
        scale=scale,
        is_causal=True,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        logits_soft_cap=logits_soft_cap,
        score_mod=score_mod,
        sink=sink,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        tile=tile,
        implementation=implementation,
    )
    checks.self_attention("sparse_transformer_attention", query, key)
    checks.known_length("sparse_transformer_attention", query)
    factors = _strided if kind == "strided" else functools.partial(_fixed, int(summary))
    with jax.named_scope("sparse_transformer_attention"):
        out, lse = factors(int(stride), factor, query, key, value, given)
    return (out, dtypes.logarithms(lse)) if return_residual else out


def _check(stride, kind, summary, factor):
    checks.at_least("stride", stride, 1, "tokens")
    for name, value_, known in (("kind", kind, KINDS), ("factor", factor, FACTORS)):
        if value_ not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value_!r}")
    if not checks.is_integer(summary) or not 1 <= summary <= stride:
        raise ValueError(
            f"summary must be an int from 1 to the stride {stride}, tokens at the end of a block, "
            f"got {summary!r}"
        )
    if kind == "strided" and summary != 1:
        raise ValueError(f"summary is for kind='fixed', got {summary} with kind='strided'")


def _strided(stride: int, factor: str, query, key, value, given: attention.Arguments):
    """The window, and the residue class; merged, the class without what the window holds."""
    length = query.shape[-3]

    def attend(step: int, left: int, right: int, given=given):
        window = dataclasses.replace(given, window=(left, right), is_causal=False)
        return sliding_window.attend(step, query, key, value, window)

    if factor == "first":
        return attend(1, stride, 0)
    if factor == "second":
        return attend(stride, length, 0)
    # A sink is one more key, of one of the parts.
    rest = attend(stride, length, -1, dataclasses.replace(given, sink=None))
    return combine(*zip(attend(1, stride - 1, 0), rest, strict=True))


def _fixed(summary: int, stride: int, factor: str, query, key, value, given: attention.Arguments):
    """The block, and the summaries; merged, those of earlier blocks."""
    if factor == "first":
        return folding.attend_inside(stride, query, key, value, given)
    if factor == "second":
        return _summaries(stride, summary, None, query, key, value, given)
    rest = dataclasses.replace(given, sink=None)
    earlier = _summaries(stride, summary, _EarlierBlocks(stride), query, key, value, rest)
    own = folding.attend_inside(stride, query, key, value, given)
    return combine(*zip(own, earlier, strict=True))


@dataclasses.dataclass(frozen=True)
class _EarlierBlocks:
    """The rule of pairs whose key lies in a block before the query's."""

    size: int

    def allows(self, i, j, h):
        return j // self.size < i // self.size


def _summaries(stride: int, summary: int, rule, query, key, value, given: attention.Arguments):
    """Causal attention to the last `summary` tokens of each block, of the pairs of `rule`."""
    batch, length = query.shape[:-3], query.shape[-3]
    axis = len(batch)
    where = np.arange(length)
    where = where[where % stride >= stride - summary]

    def pick(array):
        return jnp.take(array, where, axis=axis)

    def positions(known):
        return jnp.broadcast_to(jnp.asarray(known, jnp.int32), (*batch, len(known)))

    key_lengths, mask = given.key_lengths, None
    if key_lengths is not None:
        mask = (jnp.asarray(where) < key_lengths[..., None])[..., None, None, :]
    picked = dataclasses.replace(
        given,
        mask=mask,
        key_lengths=None,
        segments=given.segments and (given.segments[0], pick(given.segments[1])),
        positions=(positions(np.arange(length)), positions(where)),
        pattern=rule,
    )
    return attention.attend(query, pick(key), pick(value), picked)


def _reach(i, capacity: int, stride: int, kind: str, summary: int, factor: str):
    """The positions that a query at position i attends to, where they lie from 0 to i."""
    _check(stride, kind, summary, factor)
    blocks = math.ceil(capacity / stride)
    if kind == "strided":
        window = jnp.arange(min(stride + (factor == "first"), capacity))
        own_class = stride * jnp.arange(int(factor == "merged"), blocks)
        near, far = i - window, i - own_class
    else:
        own = i // stride
        far = (jnp.arange(blocks)[:, None] * stride + jnp.arange(stride - summary, stride)).ravel()
        if factor == "merged":
            far = jnp.where(far < own * stride, far, -1)
        near = own * stride + jnp.arange(min(stride, capacity))
    return {"merged": jnp.concatenate([near, far]), "first": near, "second": far}[factor]


registry.register(
    registry.Mechanism(
        name="sparse_transformer",
        family="sparse",
        paper="Child et al. 2019, Sparse Transformers",
        function=sparse_transformer_attention,
        capabilities=frozenset(registry.CAPABILITIES)
        - {"bidirectional", "cross", "offset", "window", "bias", "mask", "state"},
        options={"stride": 128, "kind": "strided", "summary": 1, "factor": "merged"},
        decoder="effattn.decode.gathered:decoder",
        reach=_reach,
        options_at=lambda length: {"stride": math.isqrt(length)},
        complexity="O(N sqrt N)",
        time_exponent=1.5,
    )
)
