"""Factorised attention of Sparse Transformers, strided and fixed."""

import dataclasses
import functools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks
from effattn.arrays.combine import combine
from effattn.cores import attention, folding
from effattn.functional import sliding_window, softmax
from effattn.naive import over_pairs, with_naive
from effattn.options import Packing, Score, Sink, Softmax, Tile, declared
from effattn.patterns import SlidingWindow, sparse_transformer


class Options(Packing, Score, Sink, Tile, Softmax, total=False):
    """The shared options of `sparse_transformer_attention`."""


def naive(query, key, value, pairs, *, scale, stride, kind, summary, factor):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`. Returns output and log-sum-exp."""
    i, j = pairs.i[:, None], pairs.j
    if kind == "strided":
        first, second = i - j <= stride, (i - j) % stride == 0
    else:
        first, second = i // stride == j // stride, j % stride >= stride - summary
    allowed = {"first": first, "second": second, "merged": first | second}[factor]
    return softmax.naive(query, key, value, pairs.where(allowed), scale=scale)


@with_naive(over_pairs(naive))
@declared
def sparse_transformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    stride: int,
    kind: str = "strided",
    summary: int = 1,
    factor: str = "merged",
    **options: Unpack[Options],
) -> Any:
    r"""Factorised causal attention (Child et al. 2019, "Sparse Transformers").

    For a stride l, a query at position i attends to the keys at positions j <= i of

        strided    first {j : i - j <= l},              second {j : (i - j) mod l = 0}
        fixed      first {j : floor(j/l) = floor(i/l)}, second {j : j mod l >= l - c}

    with c = `summary`. "merged" is the union of both factors, the merged head of the paper; "first"
    and "second" select one factor, for heads or layers that alternate. The strided second factor is
    computed in the l residue classes of positions; the fixed factors are computed in blocks and
    over the summary tokens only.

    Time O(T (l + T / l) (H + Hv)) strided and O(T (l + c T / l) (H + Hv)) fixed: O(T sqrt(T)) for l
    near sqrt(T). Memory O(T), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      stride: l, in tokens, 1 or more.
      kind: "strided" or "fixed".
      summary: c, number of last tokens of a block that later blocks attend to, 1 to l; only for
        "fixed".
      factor: "merged", "first" or "second".
      **options: padding, packing, scale, soft cap, `score_mod`, sink, dropout, log-sum-exp, tiles
        and execution: see `effattn.options`. `segment_ids` need kind="strided", whose pattern
        depends on distances alone.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
    """
    sparse_transformer(stride, kind, summary, factor)  # checks the options
    if options.get("segment_ids") is not None and kind == "fixed":
        raise ValueError(
            "segment_ids need kind='strided', got kind='fixed', whose blocks count from the start "
            "of the sequence, not of each segment"
        )
    given = attention.check(
        "sparse_transformer_attention", query, key, value, is_causal=True, **options
    )
    checks.self_attention("sparse_transformer_attention", query, key)
    checks.known_length("sparse_transformer_attention", query)
    factors = _strided if kind == "strided" else functools.partial(_fixed, int(summary))
    with jax.named_scope("sparse_transformer_attention"):
        out, lse = factors(int(stride), factor, query, key, value, given)
    return attention.results(out, lse, given)


def _strided(stride: int, factor: str, query, key, value, given: attention.Arguments):
    """Attends to the window and the residue class; merged, the class excludes the window."""
    length = query.shape[-3]

    def attend(step: int, left: int, right: int, given=given):
        window = dataclasses.replace(given, window=(left, right), is_causal=False)
        return sliding_window.attend(step, query, key, value, window)

    if factor == "first":
        return attend(1, stride, 0)
    if factor == "second":
        return attend(stride, length, 0)
    # A sink is one more key, so only one part may include it.
    rest = attend(stride, length, -1, dataclasses.replace(given, sink=None))
    return combine(*zip(attend(1, stride - 1, 0), rest, strict=True))


def _fixed(summary: int, stride: int, factor: str, query, key, value, given: attention.Arguments):
    """Attends to the block and the summaries; merged, only to summaries of earlier blocks."""
    if factor == "first":
        return folding.attend_inside(stride, query, key, value, given)
    if factor == "second":
        return _summaries(stride, summary, None, query, key, value, given)
    rest = dataclasses.replace(given, sink=None)
    earlier = _summaries(stride, summary, ~SlidingWindow(0, 0, stride), query, key, value, rest)
    own = folding.attend_inside(stride, query, key, value, given)
    return combine(*zip(own, earlier, strict=True))


def _summaries(stride: int, summary: int, rule, query, key, value, given: attention.Arguments):
    """Attends causally to the last `summary` tokens of each block, restricted by `rule`."""
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


registry.register(
    registry.Mechanism(
        name="sparse_transformer",
        family="sparse",
        paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers",
        function=sparse_transformer_attention,
        capabilities=frozenset({"causal"}),
        options={"stride": 128, "kind": "strided", "summary": 1, "factor": "merged"},
        decoder="effattn.decode.gathered:GatheredDecoder",
        pattern=sparse_transformer,
        options_at=lambda length: {"stride": math.isqrt(length)},
        complexity="O(N sqrt N)",
        time_exponent=1.5,
    )
)
