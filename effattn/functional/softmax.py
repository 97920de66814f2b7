"""Exact softmax attention."""

import dataclasses
from typing import Any, Unpack

import jax

from effattn import registry
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Direction, Offset, Packing, Score, Sink, Softmax, Tile, Window, declared


class Options(Direction, Offset, Window, Packing, Score, Sink, Tile, Softmax, total=False):
    """The shared options of `dot_product_attention`."""


def naive(query, key, value, pairs, *, scale):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`. Returns output and log-sum-exp."""
    weights, lse = pairs.softmax(scale * dot(query, key.T))
    return dot(weights, value), lse


@with_naive(over_pairs(naive))
@declared
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Exact softmax attention in linear memory (Vaswani et al. 2017; Dao et al. 2022).

    For each head,

        out_i = sum_j softmax_j(logits_ij) v_j,    logits_ij = scale * q_i . k_j + bias_ij,

    over the keys j that query i may attend to. The result equals `jax.nn.dot_product_attention` for
    the arguments of that function, except that rows without keys give zeros. A query may attend to
    a key only if all of mask, causality, window, lengths and segments allow it.

    Time O(T S (H + Hv)) over the tiles that causality and the window keep; memory O(T + S), forward
    and backward, in addition to `bias` and `mask`. Differentiable, including the log-sum-exp, in
    reverse and forward mode; derivatives of the gradient are those of forward mode (`jax.hessian`).

    In a program that `jax.export` makes with a symbolic length, all T x S logits are one tile.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, Hv)`.
      bias: broadcasts to `(*B, N, T, S)`; added to the scaled products. Has a gradient.
      mask: bool, broadcasts to `(*B, N, T, S)`; True attends. A mask of shape `(*B, 1, 1, S)` costs
        the same as lengths, and masked keys and values may hold any value, including NaN.
      **options: direction, offset, window, padding, packing, scale, soft cap, `score_mod`, sink,
        dropout, log-sum-exp, tiles and execution: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      TypeError: also in reverse-mode differentiation of most gradients; and the errors of
        `effattn.options`.
    """
    given = attention.check(
        "dot_product_attention", query, key, value, bias=bias, mask=mask, **options
    )
    given = dataclasses.replace(given, by_cudnn=True)
    with jax.named_scope("dot_product_attention"):
        out, lse = attention.attend(query, key, value, given)
    return attention.results(out, lse, given)


registry.register(
    registry.Mechanism(
        name="softmax",
        family="exact",
        paper="Vaswani et al. 2017, Attention Is All You Need; in tiles: Dao et al. 2022",
        function=dot_product_attention,
        capabilities=frozenset({"cross"}),
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
