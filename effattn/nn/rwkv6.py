"""Mixer with the time mixing of RWKV-6."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.rwkv6 import rwkv6_attention
from effattn.nn.layers import Layers
from effattn.nn.options import Recurrent
from effattn.nn.time_mixing import TimeMixing

_zeros = nnx.initializers.zeros


class RWKV6(TimeMixing):
    """Time mixing of RWKV-6 (Peng et al. 2024, "Eagle and Finch", section 4.2).

    x' is the previous token. Each of the five inputs c (decay, key, value, receptance, gate) is
    interpolated between x and x' by an amount m_c that depends on the token:

        m_c = mu_c + tanh((x + (x' - x) mu) A_c) B_c;   x_c = x + (x' - x) m_c
        r, k, v, g = x_r W_r, x_k W_k, x_v W_v, silu(x_g W_g)
        log w = -exp(mu_w + tanh(x_w A) B)
        y = (norm(rwkv6_attention(r, k, v, log w, u)) g) W_o

    `norm` is a layer norm of each head.

    Args:
      head_dim: H, head dimension; default D / N. The paper has 64.
      num_kv_heads: K, number of key, value and decay heads, a divisor of N; default N (paper).
      mixing_rank: rank of A_c B_c.
      decay_rank: rank of A B.
      depth: relative depth of the layer, 0 (first) to 1 (last); sets initial parameters.
      **options: see `effattn.nn.options.Recurrent`.
    """

    _mechanism = "rwkv6"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        mixing_rank: int = 32,
        decay_rank: int = 64,
        depth: float = 0.5,
        **options: Unpack[Recurrent],
    ):
        super().__init__(
            in_features,
            num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            depth=depth,
            **options,
        )
        mixing_rank = checks.at_least("mixing_rank", mixing_rank, 1, "features")
        decay_rank = checks.at_least("decay_rank", decay_rank, 1, "features")
        make, of_keys = Layers(**options), self.num_kv_heads * self.head_dim
        # Initial values of the authors' code: decay grows along the features, less in later layers.
        place, power = np.arange(in_features) / in_features, 1 - depth
        decay = key = 1 - place**power
        value, receptance = 1 - place**power - 0.3 * depth, 1 - place ** (power / 2)
        self.shift = make.constant(decay)
        self.shifts = make.constant(np.stack([decay, key, value, receptance, receptance]))
        self.mixing_in = make.linear(in_features, 5 * mixing_rank, kernel_init=_zeros)
        self.mixing_out = make.drawn(_small, 5, mixing_rank, in_features)
        feature = np.arange(of_keys) / max(of_keys - 1, 1)
        self.decay = make.constant(-6 + 5 * feature ** (0.7 + 1.3 * depth))
        self.decay_in = make.linear(in_features, decay_rank, kernel_init=_zeros)
        self.decay_out = make.linear(decay_rank, of_keys, kernel_init=_small)
        zigzag = 0.1 * ((np.arange(of_keys) + 1) % 3 - 1)
        bonus = depth * (1 - feature) + zigzag
        self.bonus = make.constant(bonus.reshape(self.num_kv_heads, self.head_dim))
        self.gate = make.linear(in_features, num_heads * self.head_dim)

    def _mix(self, x, state, lengths, segment_ids):
        sums, before = (None, None) if state is None else state
        x, change, last = self._shifted(x, before, lengths, segment_ids)
        low = jnp.tanh(self.mixing_in(x + change * lead(self.shift[...], 3).astype(x.dtype)))
        low = low.reshape(*x.shape[:2], 5, low.shape[-1] // 5)
        amounts = jnp.einsum("btcr,crd->cbtd", low, self.mixing_out[...].astype(x.dtype))
        amounts = amounts + self.shifts[...].astype(x.dtype)[:, None, None]
        of_decay, of_key, of_value, of_receptance, of_gate = x[None] + change[None] * amounts
        wide = dtypes.wide(x.dtype)
        decay = self.decay_out(jnp.tanh(self.decay_in(of_decay))).astype(wide)
        log_decay = -jnp.exp(decay + lead(self.decay[...], 3).astype(wide))
        out, sums = rwkv6_attention(
            self._heads(self.receptance(of_receptance), self.num_heads),
            self._heads(self.key(of_key), self.num_kv_heads),
            self._heads(self.value(of_value), self.num_kv_heads),
            log_decay=self._heads(log_decay, self.num_kv_heads),
            bonus=self.bonus[...],
            **self._options(sums, lengths, segment_ids),
        )
        return self.out(self._normalised(out) * jax.nn.silu(self.gate(of_gate))), (sums, last)


def _small(key, shape, dtype):
    """Initializer: uniform in +-0.01."""
    return jax.random.uniform(key, shape, dtype, -0.01, 0.01)
