"""Mixer with learned attention spans."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class AdaptiveSpanSelfAttention(SelfAttention):
    """Mixer with learned attention spans (Sukhbaatar et al. 2019, "Adaptive Attention Span").

        q, k, v = x Wq, x Wk, x Wv;   z = M sigmoid(p)
        y = adaptive_span_attention(q, k, v, span=z) Wo

    p, `(N,)`, is learned, one number for each query head. Add `penalty`, times a weight, to the
    loss: heads that gain nothing from far tokens then learn short spans. The time is that of the
    longest allowed span M. After training, a layer with a smaller `max_span` M' that no span
    exceeds, ramp included, computes the same in less time, with p' such that M' sigmoid(p') = z.

    Args:
      max_span: M, largest span, in tokens.
      initial_span: z at the start, in tokens, above 0 and below M; default M / 8.
      **options: as in `SelfAttention`, and options of `effattn.adaptive_span_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        max_span: int = 256,
        initial_span: float | None = None,
        **options: SelfAttentionOptions,
    ):
        refuse(type(self), options, ("span",), "it learns the spans")
        self.max_span = checks.at_least("max_span", max_span, 1, "tokens, the own token included")
        needs = f"a number above 0 and below max_span={max_span}, or None"
        share = (
            1 / 8
            if initial_span is None
            else checks.real("initial_span", initial_span, needs) / max_span
        )
        if not 0 < share < 1:
            raise ValueError(f"initial_span must be {needs}, got {initial_span}")
        super().__init__(
            in_features, num_heads, "adaptive_span", **{**options, "max_span": max_span}
        )
        logits = np.full(num_heads, np.log(share / (1 - share)))
        self.span_logits = Layers(**options).constant(logits)

    def spans(self) -> jax.Array:
        """The span of each query head, `(N,)`, in tokens, at least float32."""
        logits = self.span_logits[...]
        return self.max_span * jax.nn.sigmoid(dtypes.widen(logits))

    def penalty(self) -> jax.Array:
        """The mean of the spans, `()`, in tokens."""
        return jnp.mean(self.spans())

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "span": self.spans()}
