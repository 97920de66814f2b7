"""Mixer with the mesa layer."""

import jax
import numpy as np

from effattn.arrays.dtypes import widen
from effattn.nn.delta_rule import DeltaRule
from effattn.nn.initializers import forget_bias_init
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions

LEAST = 0.25  # lower bound of the regulariser, as in the authors' code


class MesaNet(DeltaRule):
    """Mixer with the mesa layer (von Oswald et al. 2025, "MesaNet").

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))
        beta = sigmoid(x Wb + bb);   log alpha = log sigmoid(x Wa + ba)
        y = norm(mesa_attention(q / |q|, k / |k|, v, beta, log alpha, regulariser)) Wo

    The regulariser is 0.25 + softplus of a learned vector for each key head, and starts at 1. The
    forget gates start near 1: the biases ba of the heads start from 3 to 6.

    Args:
      num_steps: conjugate-gradient steps.
      convolution_width: as in `DeltaNet`.
      **options: as in `DeltaNet`, and options of `effattn.mesa_attention`.
    """

    _mechanism = "mesa"
    _gates = ("beta", "log_decay", "regulariser")

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_steps: int = 30,
        convolution_width: int = 4,
        **options: SelfAttentionOptions,
    ):
        super().__init__(
            in_features,
            num_heads,
            num_steps=num_steps,
            convolution_width=convolution_width,
            **options,
        )
        make, of_keys = Layers(**options), self.num_kv_heads
        self.strength = make.linear(in_features, of_keys, use_bias=True)
        self.decay = make.linear(in_features, of_keys, use_bias=True, bias_init=forget_bias_init)
        start = np.log(np.expm1(1 - LEAST))
        self.regulariser = make.constant(np.full((of_keys, self.head_dim), start))

    def _options(self):
        regulariser = LEAST + jax.nn.softplus(widen(self.regulariser[...]))
        return {**super()._options(), "regulariser": regulariser}

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {
            "beta": jax.nn.sigmoid(widen(self.strength(x))),
            "log_decay": jax.nn.log_sigmoid(widen(self.decay(x))),
        }
