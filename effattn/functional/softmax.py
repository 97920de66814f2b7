"""Exact softmax attention."""

import contextlib
import dataclasses
import functools
from typing import Any, Unpack

import jax

from effattn import dispatch, registry
from effattn.arrays import checks
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
    and backward, in addition to `bias` and `mask`. Differentiable in reverse mode, including the
    log-sum-exp; forward-mode derivatives of the gradient also work (`jax.hessian`).

    In a program that `jax.export` makes with a symbolic length, all T x S logits are one tile.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
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
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
      TypeError: in forward-mode differentiation, or in reverse-mode differentiation of most
        gradients.
    """
    given = attention.check(
        "dot_product_attention", query, key, value, bias=bias, mask=mask, **options
    )
    with jax.named_scope("dot_product_attention"):
        out, lse = _attend(query, key, value, given)
    return attention.results(out, lse, given)


def _attend(query, key, value, given: attention.Arguments):
    """Calls the requested implementations in order; cuDNN refuses only when it is called.

    If cuDNN takes the call, there is a GPU, so the implementations named before it can run too.
    """
    names = dispatch.requested(given.implementation)
    if names is None or "cudnn" not in names:
        return attention.attend(query, key, value, given)
    at = names.index("cudnn")
    by_cudnn = functools.partial(_attend_cudnn, given=given)
    try:
        if at == 0:
            return by_cudnn(query, key, value)
        jax.eval_shape(by_cudnn, query, key, value)
    except NotImplementedError:
        if names == ("cudnn",):
            raise
        others = tuple(name for name in names if name != "cudnn")
        return attention.attend(query, key, value, _by(given, others))
    with contextlib.suppress(NotImplementedError):
        return attention.attend(query, key, value, _by(given, names[:at]))
    return by_cudnn(query, key, value)


def _by(given, implementation):
    return dataclasses.replace(given, implementation=implementation)


# `jax.nn.dot_product_attention` checks other limits when it is called.
_CUDNN = dispatch.Limits(("bfloat16", "float16"), others="what `jax.nn` takes")


def _attend_cudnn(query, key, value, *, given: attention.Arguments):
    unsupported = {
        "query_offset": not (checks.is_integer(given.query_offset) and given.query_offset == 0),
        "segment_ids": given.segments is not None,
        "logits_soft_cap": given.soft_cap is not None,
        "score_mod": given.score_mod is not None,
        "sink": given.sink is not None,
        "dropout_rate": given.dropout_rate != 0,
        "precision": given.precision is not None,
        "tile": given.tile is not None,
    }
    names = [name for name, used in unsupported.items() if used]

    def refusal():
        return f"does not take {', '.join(names)}" if names else _CUDNN.refusal(query.dtype)

    call = dispatch.Call(
        "dot_product_attention", {"cudnn": refusal, "xla": lambda: None}, limits=lambda _: _CUDNN
    )
    (chosen,) = dispatch.choose("cudnn", call).names
    try:
        by_cudnn: Any = (
            jax.nn.dot_product_attention
        )  # its overloads do not describe a bool variable
        result = by_cudnn(
            query,
            key,
            value,
            given.bias,
            given.mask,
            scale=given.scale,
            is_causal=given.is_causal,
            query_seq_lengths=given.query_lengths,
            key_value_seq_lengths=given.key_lengths,
            local_window_size=given.window,
            implementation=chosen,
            return_residual=given.return_residual,
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise NotImplementedError(
            f"implementation='cudnn' refused: {error}; implementation='xla' takes these"
        ) from error
    return result if given.return_residual else (result, None)


registry.register(
    registry.Mechanism(
        name="softmax",
        family="exact",
        paper="Vaswani et al. 2017, Attention Is All You Need; in tiles: Dao et al. 2022",
        function=dot_product_attention,
        capabilities=frozenset({"cross"}),
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2)",
        time_exponent=2.0,
    )
)
