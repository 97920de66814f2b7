"""Mixer with the neural memory of Titans."""

import jax

from effattn.arrays.dtypes import widen
from effattn.nn.delta_rule import DeltaRule
from effattn.nn.gated_output import GatedOutput
from effattn.nn.initializers import forget_bias_init
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions


class TitansMemory(GatedOutput, DeltaRule):
    """Mixer with the linear neural memory of Titans (Behrouz et al. 2025, "Titans").

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))
        momentum = sigmoid(x Wm + bm);   log_decay = log sigmoid(x Wa + ba)
        learning_rate = (1 - momentum) * sigmoid(x Wr + br) / mini_batch_size
        y = (silu(x Wg) * norm(titans_memory(q / |q|, k / |k|, v, ...))) Wo

    With momentum, a step also acts on later tokens. The factor 1 - momentum bounds the sum of the
    effects of a step, and with it the memory of equal tokens. The biases ba of the heads start from
    3 to 6, so that heads start with shorter and longer memories.

    Args:
      mini_batch_size: tokens in a mini-batch.
      convolution_width: as in `DeltaNet`.
      **options: as in `DeltaNet` (`use_bias` is also for Wg), and options of
        `effattn.titans_memory`.
    """

    _mechanism = "titans"
    _gates = ("learning_rate", "momentum", "log_decay")

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        mini_batch_size: int = 16,
        convolution_width: int = 4,
        **options: SelfAttentionOptions,
    ):
        super().__init__(
            in_features,
            num_heads,
            mini_batch_size=mini_batch_size,
            convolution_width=convolution_width,
            **options,
        )
        self.mini_batch_size = mini_batch_size
        make, of_keys = Layers(**options), self.num_kv_heads
        self.learning_rate, self.momentum = (
            make.linear(in_features, of_keys, use_bias=True) for _ in range(2)
        )
        self.decay = make.linear(in_features, of_keys, use_bias=True, bias_init=forget_bias_init)
        sizes = num_heads, self.value_dim
        self.gate = make.heads(in_features, sizes, use_bias=options.get("use_bias", False))

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        momentum = widen(self.momentum(x))
        learning_rate = jax.nn.sigmoid(-momentum) * jax.nn.sigmoid(widen(self.learning_rate(x)))
        return {
            "learning_rate": learning_rate / self.mini_batch_size,
            "momentum": jax.nn.sigmoid(momentum),
            "log_decay": jax.nn.log_sigmoid(widen(self.decay(x))),
        }
