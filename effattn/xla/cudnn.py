"""Softmax attention by cuDNN, through `jax.nn.dot_product_attention`."""

import functools
from typing import Any

import jax

from effattn import dispatch
from effattn.arrays import checks
from effattn.dispatch import contexts

# `jax.nn.dot_product_attention` checks other limits when it is called.
LIMITS = dispatch.Limits(
    ("bfloat16", "float16"), others="the limits of jax.nn.dot_product_attention"
)


def refusal(query: jax.Array, key: jax.Array, value: jax.Array, given: Any) -> str | None:
    """The reason why cuDNN rejects a call of `dot_product_attention`, or None.

    `given` is the `effattn.cores.attention.Arguments` of the call.
    """
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
    if names := [name for name, used in unsupported.items() if used]:
        return f"does not take {', '.join(names)}"
    if reason := LIMITS.refusal(query.dtype):
        return reason
    # The support table lists what cuDNN takes, also on a machine without cuDNN.
    name = "cudnn" if contexts.recorder() is None else "xla"
    try:
        jax.eval_shape(functools.partial(attend, given=given, name=name), query, key, value)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"refuses the call: {error}"
    return None


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, given: Any, name: str = "cudnn"
) -> Any:
    """The output, and the log-sum-exp if asked for or None, by an implementation of `jax.nn`."""
    options = {
        "scale": given.scale,
        "is_causal": given.is_causal,
        "query_seq_lengths": given.query_lengths,
        "key_value_seq_lengths": given.key_lengths,
        "local_window_size": given.window,
        "implementation": name,
        "return_residual": given.return_residual,
    }
    traced = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    static = tuple((n, x) for n, x in options.items() if n not in traced)
    result = _by_jax_nn(static, traced, query, key, value, given.bias, given.mask)
    return result if given.return_residual else (result, None)


# Under `jax.jit` so that it is traced once: `refusal` and the call itself both trace it.
@functools.partial(jax.jit, static_argnums=0)
def _by_jax_nn(static, traced, *arrays):
    by: Any = jax.nn.dot_product_attention  # its overloads do not describe a bool variable
    return by(*arrays, **traced, **dict(static))
