"""Mixer with gated linear attention."""

import jax

from effattn.arrays import checks, dtypes
from effattn.nn.attention import refuse
from effattn.nn.gated_output import GatedOutput
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions


class GatedLinearAttention(GatedOutput):
    """Mixer with gated linear attention (Yang et al. 2023).

        q, k, v = x Wq, x Wk, x Wv;   log alpha = log sigmoid((x W1) W2 + b) / temperature
        y = (silu(x Wr + br) * norm(gated_linear_attention(q, k, v, log alpha))) Wo

    The decay projection has rank `gate_rank`. `norm` is an RMS norm of each head with a learned
    scale, as in the authors' code; the paper uses a layer norm.

    Args:
      head_dim: H, head dimension of queries and keys; default D / (2 N), as in the paper.
      value_dim: Hv, head dimension of values; default `head_dim` if given, otherwise D / N.
      gate_rank: rank of the decay projection, the size between W1 and W2.
      temperature: a larger temperature gives slower initial decay.
      **options: as in `SelfAttention`, and options of `effattn.gated_linear_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        gate_rank: int = 16,
        temperature: float = 16.0,
        **options: SelfAttentionOptions,
    ):
        refuse(type(self), options, ("log_decay",), "it computes the decays from the tokens")
        rank = checks.at_least("gate_rank", gate_rank, 1, "features")
        temperature = checks.positive("temperature", temperature)
        if head_dim is None:
            share = head_size(in_features, num_heads)
            head_dim, value_dim = max(share // 2, 1), share if value_dim is None else value_dim
        options.update(head_dim=head_dim, value_dim=value_dim)
        super().__init__(in_features, num_heads, "gated_linear", **options)
        self.temperature = float(temperature)
        make, of_keys = Layers(**options), (self.num_kv_heads, self.head_dim)
        self.decay_in = make.linear(in_features, rank)
        self.decay_out = make.heads(rank, of_keys, use_bias=True)
        self.gate = make.heads(in_features, (num_heads, self.value_dim), use_bias=True)
        self.norm = make.rms_norm(self.value_dim)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        logits = self.decay_out(self.decay_in(x))
        # At least float32, since log decays are summed over many tokens.
        logits = dtypes.widen(logits)
        return {"log_decay": jax.nn.log_sigmoid(logits) / self.temperature}
