"""Dense Synthesizer: attention to learned keys, one for each position."""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks
from effattn.functional.softmax import dot_product_attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Direction, Implementation, Offset, Packing, Padding, declared


class Options(Direction, Offset, Padding, Packing, Implementation, total=False):
    """The shared options of `synthesizer_attention`."""


def naive(hidden, table, value, pairs):
    """One head: hidden `(T, A)`, table `(S, A)`, value `(S, Hv)`."""
    weights, _ = pairs.softmax(dot(hidden, table.T.astype(hidden.dtype)))
    return dot(weights, value)


@with_naive(over_pairs(naive))
@declared
def synthesizer_attention(
    hidden: jax.Array,
    table: jax.Array,
    value: jax.Array,
    **options: Unpack[Options],
) -> jax.Array:
    r"""Dense synthetic attention (Tay et al. 2020, "Synthesizer: Rethinking Self-Attention").

        y_t = sum_s softmax_s(h_t . r_s) v_s

    The logits are a learned function of the token of the query and the position of the key: h_t
    depends only on token t, and r_s is a learned row for position s. This is dot-product attention
    with learned keys: time O(T S (A + Hv)), memory O((T + S) A). If h is also a learned row for
    each position, this is the factorised random Synthesizer.

    Args:
      hidden: h, `(*B, T, N, A)`; relu(x W_1 + b) in the paper.
      table: r, `(S, N, A)` or `(*B, S, N, A)`; the columns of W_2 in the paper.
      value: `(*B, S, N, Hv)`.
      **options: direction, offset, padding, packing and implementation: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
      NotImplementedError: an implementation that does not take this call.
    """
    heads = (value.shape[-3], *hidden.shape[-2:]) if value.ndim >= 3 <= hidden.ndim else None
    if heads is None or table.ndim < 3 or table.shape[-3:] != heads:
        raise ValueError(
            "table must have shape (S, N, A) for hidden (*B, T, N, A) and value (*B, S, N, Hv), "
            f"got {table.shape} for {hidden.shape} and {value.shape}"
        )
    shape = (*value.shape[:-3], *heads)
    checks.shaped("table", table, heads if table.ndim == 3 else shape)
    keys = jnp.broadcast_to(table, shape).astype(hidden.dtype)
    return dot_product_attention(hidden, keys, value, scale=1.0, **options)


# Registry entry of one of the five kinds, each in a file of its own.
entry: Any = functools.partial(
    registry.Mechanism,
    family="synthetic",
    paper="Tay et al. 2020, Synthesizer: Rethinking Self-Attention in Transformer Models",
    takes_heads=False,
    builder="effattn.nn.synthesizer:Synthesizer",
    time_exponent=2.0,
)
CAPABILITIES = frozenset({"causal", "bidirectional", "lengths", "segments", "decode"})

registry.register(
    entry(
        name="synthesizer",
        function=synthesizer_attention,
        capabilities=CAPABILITIES,
        options={"kind": "dense"},
        complexity="O(N^2 (A + H)), O(N (A + H)) a step",
    )
)
