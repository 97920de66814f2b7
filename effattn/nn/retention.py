"""Multi-scale retention of RetNet."""

from effattn.nn.gated_output import GatedOutput
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.rotary import RotaryEmbedding

_TURN = RotaryEmbedding()


class RetNet(GatedOutput):
    """Mixer with gated multi-scale retention (Sun et al. 2023, "Retentive Network").

        q, k, v = x Wq, x Wk, x Wv;   o = norm(retention(rotary(q), rotary(k), v))
        y = (silu(x Wg) * o) Wo

    Values have twice the head dimension of queries and keys. `norm` is an RMS norm of each head:
    the group norm of the paper without the subtraction of the mean.

    Args:
      num_heads: N, number of heads; head h has the decay 1 - 2^(-5 - h).
      value_dim: Hv, head dimension of values; default 2 H.
      rotary: rotary position embedding; default `RotaryEmbedding()` for an even head dimension,
        None (no rotation) for an odd head dimension.
      **options: as in `SelfAttention` (`use_bias` is also for Wg), and options of
        `effattn.retention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rotary: RotaryEmbedding | None = _TURN,
        **options: SelfAttentionOptions,
    ):
        size = head_size(in_features, num_heads, head_dim)
        value_dim = 2 * size if value_dim is None else value_dim
        if rotary is _TURN and size % 2:
            rotary = None
        options.update(head_dim=head_dim, value_dim=value_dim, rotary=rotary)
        super().__init__(in_features, num_heads, "retention", **options)
        make, sizes = Layers(**options), (num_heads, self.value_dim)
        self.gate = make.heads(in_features, sizes, use_bias=options.get("use_bias", False))
        self.norm = make.rms_norm(self.value_dim, use_scale=False)
