"""Mixer with gated slot attention."""

import jax
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class GatedSlotAttention(SelfAttention):
    """Mixer with gated slot attention (Zhang et al. 2024, "Gated Slot Attention for ...").

        q, k, v = silu(x Wq), silu(x Wk), silu(x Wv);   log alpha = log sigmoid(x Wa) / temperature
        y = norm(silu(gated_slot_attention(q, k, v, log alpha))) Wo

    `norm` is an RMS norm of the outputs of all heads together, with a learned scale.

    Args:
      num_slots: m, number of slots of each key head.
      temperature: a larger temperature gives slower initial decay.
      **options: as in `SelfAttention`, and options of `effattn.gated_slot_attention`; `scale` is 1
        by default, as in the paper.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_slots: int = 64,
        temperature: float = 8.0,
        **options: SelfAttentionOptions,
    ):
        refuse(type(self), options, ("log_decay",), "it computes the decays from the tokens")
        self.num_slots = checks.at_least("num_slots", num_slots, 1, "slots")
        self.temperature = float(checks.positive("temperature", temperature))
        super().__init__(in_features, num_heads, "gated_slot", **{"scale": 1.0, **options})
        make = Layers(**options)
        self.decay = make.heads(in_features, (self.num_kv_heads, num_slots))
        self.norm = make.rms_norm(num_heads * self.value_dim, epsilon=1e-5)

    def _heads(self, x, positions, *, lengths=None, segment_ids=None):
        query, key, value = super()._heads(x, positions, lengths=lengths, segment_ids=segment_ids)
        return jax.nn.silu(query), jax.nn.silu(key), jax.nn.silu(value)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        logits = self.decay(x)
        # At least float32, since log decays are summed over many tokens.
        logits = dtypes.widen(logits)
        return {"log_decay": jax.nn.log_sigmoid(logits) / self.temperature}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        normalised = self.norm(jax.nn.silu(lax.collapse(out, 2)))
        return self.out(normalised.reshape(out.shape))
