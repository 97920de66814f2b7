"""Exact softmax attention."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax

from effattn import dispatch, registry
from effattn.arrays import checks, dtypes
from effattn.cores import attention
from effattn.cores.attention import ScoreMod


@checks.checked
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_offset: int | jax.Array = 0,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
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
    r"""Softmax attention, exact, in memory linear in length (Vaswani et al. 2017; Dao et al. 2022).

    For each head,

        out_i = sum_j softmax_j(logits_ij) v_j,    logits_ij = scale * q_i . k_j + bias_ij,

    over the keys j that query i may attend to. A call that `jax.nn.dot_product_attention` takes
    gives the same numbers here, except that a row with nothing to attend to gives zeros. Everything
    that restricts attention is combined by "and".

    Time O(T S (H + Hv)) over the tiles that causality and the window leave; memory O(T + S),
    forward and backward, besides `bias` and `mask` as given. Differentiable in reverse mode, the
    residual included; of the gradient there are derivatives in forward mode (`jax.hessian`).

    In a program that `jax.export` makes with an open length all T x S logits are one tile.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, S, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, S, K, Hv)`.
      bias: broadcasts to `(*B, N, T, S)`; added to the scaled products. Has a gradient.
      mask: bool, broadcasts to `(*B, N, T, S)`; True attends. One of shape `(*B, 1, 1, S)` costs no
        more than lengths do, and what it hides may be anything, NaN too.
      scale: default H**-0.5. May be an array, with a gradient.
      is_causal: query i attends to keys at positions up to its own; top-left aligned.
      query_offset: query t stands at position t + offset; an int, or an int array `()` or `(*B)`.
        Only causality, windows, `score_mod` and dropout look at positions. Where examples differ,
        windows skip what they do not hold, and causality alone skips nothing.
      query_seq_lengths: int `(*B)`; rows from there on give zeros.
      key_value_seq_lengths: int `(*B)`; keys from there on are padding.
      segment_ids: int `(*B, T)`, or a pair `(*B, T)`, `(*B, S)`; tokens attend within equal ids,
        0 is padding.
      local_window_size: w or (left, right): how many positions on each side of its own a query
        sees.
      logits_soft_cap: c > 0; logits become c * tanh(logits / c).
      score_mod: `(logit, b, h, i, j) -> logit` on scalars, after the cap: example (counted over
        all batch dimensions), query head, query position, key position. Gradients flow to the
        arrays it closes over. Memory stays linear. It is also called at pairs that may not attend:
        let it be finite there, or its gradient is not. Call it under `jax.jit`: outside, every call
        compiles anew.
      sink: `(N,)`, a logit a head that takes part in the softmax and has no value. Has a gradient.
      dropout_rate: share of the weights dropped, in [0, 1); the others are scaled up.
      dropout_rng: a `jax.random` key; needed where the rate is above 0. Whether a weight is kept
        depends on the key, example, head and the two positions alone.
      precision: of the matrix products, as in `jax.lax.dot`.
      tile: queries and keys in a tile; tuning only.
      implementation: None, a name, or a tuple of names tried in order.
        `effattn.support("softmax")` lists the names, the device that each runs on and what it
        takes; "pallas" is the first of "mosaic_gpu", "triton" and "mosaic_tpu" that takes the call
        where it runs. None is what `effattn.tune` has found; untuned, a kernel that takes the call
        in 16 bits on one Hopper GPU or in float32 on an x86-64 CPU, and elsewhere "xla".
      return_residual: also return the log-sum-exp of the logits, the sink's included.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
      TypeError: in forward-mode differentiation, or of most gradients in reverse mode again.
    """
    given = attention.check(
        "dot_product_attention",
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        score_mod=score_mod,
        sink=sink,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        tile=tile,
        implementation=implementation,
    )
    with jax.named_scope("dot_product_attention"):
        out, lse = _attend(query, key, value, given, return_residual)
    return (out, dtypes.logarithms(lse)) if return_residual else out


def _attend(query, key, value, given: attention.Arguments, return_residual: bool):
    """Of the implementations asked for, cuDNN says only when it is called what it takes.

    Where it takes the call there is a GPU, so that those named before it run there as well.
    """
    names = dispatch.requested(given.implementation)
    if names is None or "cudnn" not in names:
        return attention.attend(query, key, value, given)
    at = names.index("cudnn")
    by_cudnn = functools.partial(_attend_cudnn, given=given, return_residual=return_residual)
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


# `jax.nn.dot_product_attention` says the rest when it is called.
_CUDNN = dispatch.Limits(("bfloat16", "float16"), others="what `jax.nn` takes")


def _attend_cudnn(query, key, value, *, given: attention.Arguments, return_residual: bool):
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
            return_residual=return_residual,
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise NotImplementedError(
            f"implementation='cudnn' refused: {error}; implementation='xla' takes these"
        ) from error
    return result if return_residual else (result, None)


registry.register(
    registry.Mechanism(
        name="softmax",
        family="exact",
        paper="Vaswani et al. 2017, Attention Is All You Need; in tiles: Dao et al. 2022",
        function=dot_product_attention,
        capabilities=frozenset(registry.CAPABILITIES) - {"state"},
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        complexity="O(N^2)",
        time_exponent=2.0,
    )
)
