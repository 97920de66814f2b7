"""Mixer with the hierarchically gated recurrence of HGRN2."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.functional.gated_linear import gated_linear_attention
from effattn.nn.heads import head_size, key_heads
from effattn.nn.layers import Layers
from effattn.nn.options import Recurrent
from effattn.nn.recurrent import FunctionMixer


class HGRN2(FunctionMixer):
    """Mixer with gated linear attention whose keys are tied to the forget gates (HGRN2).

    Qin et al. 2024, "HGRN2: Gated Linear RNNs with State Expansion":

        q = silu(x Wq);   v = x Wv;   f = bound + (1 - bound) sigmoid(x Wf)
        y = norm(gated_linear_attention(q, 1 - f, v, log f)) Wo

    `norm` is an RMS norm of the outputs of all heads together, with a learned scale.

    Args:
      head_dim: H, head dimension of queries and forget gates; default D / N. The paper has 128.
      value_dim: Hv, head dimension of values; default D / N.
      num_kv_heads: K, number of heads of gates and values, a divisor of N; default N (paper).
      lower_bound: lower bound of the forget gates, in [0, 1). Upper layers remember for longer with
        a larger bound: models give layer l of L, from 0, the bound l / L.
      **options: see `effattn.nn.options.Recurrent`.
    """

    _mechanism = "hgrn2"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        lower_bound: float = 0.0,
        **options: Unpack[Recurrent],
    ):
        super().__init__(in_features, **options)
        needs = "a number in [0, 1), the least forget gate"
        if not 0 <= checks.real("lower_bound", lower_bound, needs) < 1:
            raise ValueError(f"lower_bound must be {needs}, got {lower_bound}")
        self.lower_bound = float(lower_bound)
        self.num_heads, self.num_kv_heads = num_heads, key_heads(num_heads, num_kv_heads)
        self.head_dim = head_size(in_features, num_heads, head_dim)
        value_dim = head_size(in_features, num_heads) if value_dim is None else value_dim
        self.value_dim = checks.at_least("value_dim", value_dim, 1, "features")
        make, inner = Layers(**options), num_heads * self.value_dim
        self.query = make.heads(in_features, (num_heads, self.head_dim))
        self.forget = make.heads(in_features, (self.num_kv_heads, self.head_dim))
        self.value = make.heads(in_features, (self.num_kv_heads, self.value_dim))
        self.norm = make.rms_norm(inner, epsilon=1e-5)
        self.out = make.out(inner, in_features)

    def _mix(self, x, state, lengths, segment_ids):
        key, log_decay = self._gates(self.forget(x))
        out, state = gated_linear_attention(
            jax.nn.silu(self.query(x)),
            key,
            self.value(x),
            log_decay=log_decay,
            **self._options(state, lengths, segment_ids),
        )
        return self.out(self.norm(lax.collapse(out, 2))), state

    def _gates(self, logits):
        """Keys 1 - f, and log f in at least float32, since these are summed over many tokens."""
        dtype, rest = logits.dtype, 1 - self.lower_bound
        logits = logits.astype(dtypes.wide(dtype))
        key = rest * jax.nn.sigmoid(-logits)
        if self.lower_bound:
            log_decay = jnp.log(self.lower_bound + rest * jax.nn.sigmoid(logits))
        else:
            log_decay = jax.nn.log_sigmoid(logits)  # the sigmoid may round to zero
        return key.astype(dtype), log_decay
