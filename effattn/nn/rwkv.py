"""Mixers with the time mixing of RWKV-6 and RWKV-7."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.functional.rwkv6 import rwkv6_attention
from effattn.functional.rwkv7 import rwkv7_attention
from effattn.nn import initializers
from effattn.nn.heads import default_head_dim, key_heads
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.token_shift import check_depth, token_shift


class _TimeMixing(RecurrentMixer):
    """Base class of `RWKV6` and `RWKV7`: token shift, projections and a layer norm per head."""

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        mechanism: str,
        *,
        head_dim: int | None,
        num_kv_heads: int | None,
        depth: float,
        is_causal: bool,
        dropout_rate: float,
        dtype: Any,
        param_dtype: Any,
        kernel_init: Callable[..., Any],
        out_kernel_init: Callable[..., Any] | None,
        chunk_size: int | None,
        implementation: str | tuple[str, ...] | None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            mechanism,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        if head_dim is None:
            head_dim = default_head_dim(in_features, num_heads)
        self.num_heads = checks.at_least("num_heads", num_heads, 1, "heads")
        self.head_dim = checks.at_least("head_dim", head_dim, 1, "features")
        self.num_kv_heads = key_heads(num_heads, num_kv_heads)
        check_depth(depth)
        self.chunk_size = chunk_size
        self.implementation = implementation
        inner, of_keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.receptance = self._linear(in_features, inner, kernel_init, rngs)
        self.key, self.value = (
            self._linear(in_features, of_keys, kernel_init, rngs) for _ in range(2)
        )
        self.norm = nnx.LayerNorm(
            self.head_dim,
            epsilon=64e-5,
            use_scale=False,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.norm_scale = nnx.Param(jnp.ones(inner, param_dtype))
        self.norm_bias = nnx.Param(jnp.zeros(inner, param_dtype))
        out_init = kernel_init if out_kernel_init is None else out_kernel_init
        self.out = self._linear(inner, in_features, out_init, rngs)

    def _linear(self, features_in, features_out, init, rngs):
        return nnx.Linear(
            features_in,
            features_out,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=init,
            rngs=rngs,
        )

    def _parameter(self, array):
        return nnx.Param(jnp.asarray(array, self.param_dtype))

    def _shifted(self, x, before, lengths, segment_ids):
        """Returns x, x' - x and the last token; x' is the previous token of each token."""
        dtype = dtypes.common(x, self.norm_scale[...]) if self.dtype is None else self.dtype
        shifted, last = token_shift(x, before, lengths=lengths, segment_ids=segment_ids)
        x, shifted = x.astype(dtype), shifted.astype(dtype)
        return x, shifted - x, last

    def _heads(self, projected, heads):
        return projected.reshape(*projected.shape[:2], heads, self.head_dim)

    def _normalised(self, out):
        """Normalises each head: `(B, T, N, H)` to `(B, T, N H)`."""
        out = self.norm(out).reshape(*out.shape[:2], self.num_heads * self.head_dim)
        scale, bias = (lead(p[...], 3).astype(out.dtype) for p in (self.norm_scale, self.norm_bias))
        return out * scale + bias

    def _options(self, sums, lengths, segment_ids):
        return {
            "query_seq_lengths": lengths,
            "key_value_seq_lengths": lengths,
            "segment_ids": segment_ids,
            "initial_state": sums,
            "return_state": True,
            "chunk_size": self.chunk_size,
            "implementation": self.implementation,
        }


class RWKV6(_TimeMixing):
    """Time mixing of RWKV-6 (Peng et al. 2024, "Eagle and Finch", section 4.2).

    x' is the previous token. Each of the five inputs c (decay, key, value, receptance, gate) is
    interpolated between x and x' by an amount m_c that depends on the token:

        m_c = mu_c + tanh((x + (x' - x) mu) A_c) B_c;   x_c = x + (x' - x) m_c
        r, k, v, g = x_r W_r, x_k W_k, x_v W_v, silu(x_g W_g)
        log w = -exp(mu_w + tanh(x_w A) B)
        y = (norm(rwkv6_attention(r, k, v, log w, u)) g) W_o

    `norm` is a layer norm of each head.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of heads.
      head_dim: H, head dimension; default D / N. The paper has 64.
      num_kv_heads: K, number of key, value and decay heads, a divisor of N; default N (paper).
      mixing_rank: rank of A_c B_c.
      decay_rank: rank of A B.
      depth: relative depth of the layer, 0 (first) to 1 (last); sets initial parameters.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      chunk_size: see `effattn.rwkv6_attention`.
      implementation: see `effattn.rwkv6_attention`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

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
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        chunk_size: int | None = None,
        implementation: str | tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            num_heads,
            "rwkv6",
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            depth=depth,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            chunk_size=chunk_size,
            implementation=implementation,
            rngs=rngs,
        )
        mixing_rank = checks.at_least("mixing_rank", mixing_rank, 1, "features")
        decay_rank = checks.at_least("decay_rank", decay_rank, 1, "features")
        of_keys = self.num_kv_heads * self.head_dim
        # Initial values of the authors' code: decay grows along the features, less in later layers.
        place, power = np.arange(in_features) / in_features, 1 - depth
        decay = key = 1 - place**power
        value, receptance = 1 - place**power - 0.3 * depth, 1 - place ** (power / 2)
        self.shift = self._parameter(decay)
        self.shifts = self._parameter(np.stack([decay, key, value, receptance, receptance]))
        self.mixing_in = self._linear(in_features, 5 * mixing_rank, _zeros, rngs)
        shape = 5, mixing_rank, in_features
        self.mixing_out = nnx.Param(_small(rngs.params(), shape, param_dtype))
        feature = np.arange(of_keys) / max(of_keys - 1, 1)
        self.decay = self._parameter(-6 + 5 * feature ** (0.7 + 1.3 * depth))
        self.decay_in = self._linear(in_features, decay_rank, _zeros, rngs)
        self.decay_out = self._linear(decay_rank, of_keys, _small, rngs)
        zigzag = 0.1 * ((np.arange(of_keys) + 1) % 3 - 1)
        bonus = depth * (1 - feature) + zigzag
        self.bonus = self._parameter(bonus.reshape(self.num_kv_heads, self.head_dim))
        self.gate = self._linear(in_features, num_heads * self.head_dim, kernel_init, rngs)

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


class RWKV7(_TimeMixing):
    """Time mixing of RWKV-7 (Peng et al. 2025, "RWKV-7 Goose", section 4.1).

    x' is the previous token. Each input c (receptance, decay, key, value, rate, gate) is the
    interpolation x_c = x + (x' - x) mu_c, and

        r, k, v = x_r W_r, x_k W_k, x_v W_v
        log w = -exp(-1/2) sigmoid(w_0 + tanh(x_w A_w) B_w)
        a = sigmoid(a_0 + x_a A_a B_a);   g = sigmoid(x_g A_g) B_g
        kappa = normalised(k xi);   k~ = k (1 + (a - 1) alpha)
        p = norm(rwkv7_attention(r, k~, v, log w, kappa, a)) + (r . (rho k~)) v
        y = (p g) W_o

    `normalised`, `norm` and the product with r act on each head. The models of the paper also mix
    the values of the first layer into later layers; this module does not.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of heads.
      head_dim: H, head dimension; default D / N. The paper has 64.
      num_kv_heads: K, number of key, value and decay heads, a divisor of N; default N (paper).
      decay_rank: rank of A_w B_w.
      rate_rank: rank of A_a B_a.
      gate_rank: rank of A_g B_g.
      depth: relative depth of the layer, 0 (first) to 1 (last); sets initial parameters.
      is_causal: must be True.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      chunk_size: see `effattn.rwkv7_attention`.
      implementation: see `effattn.rwkv7_attention`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        decay_rank: int = 64,
        rate_rank: int = 64,
        gate_rank: int = 128,
        depth: float = 0.5,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        chunk_size: int | None = None,
        implementation: str | tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            num_heads,
            "rwkv7",
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            depth=depth,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            chunk_size=chunk_size,
            implementation=implementation,
            rngs=rngs,
        )
        decay_rank = checks.at_least("decay_rank", decay_rank, 1, "features")
        rate_rank = checks.at_least("rate_rank", rate_rank, 1, "features")
        gate_rank = checks.at_least("gate_rank", gate_rank, 1, "features")
        inner, of_keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        small = functools.partial(initializers.orthogonal_init, scale=0.1)
        # Initial values of the authors' code.
        place = np.arange(in_features) / in_features
        powers = np.array([0.2, 0.9, 0.7, 0.7, 0.9, 0.2]) * (1 - depth)
        self.shifts = self._parameter(1 - place ** powers[:, None])
        feature = np.arange(of_keys) / max(of_keys - 1, 1)
        self.decay = self._parameter(-6.5 + 5 * feature ** (0.85 + depth**0.5))
        self.decay_in = self._linear(in_features, decay_rank, _zeros, rngs)
        self.decay_out = self._linear(decay_rank, of_keys, small, rngs)
        self.rate = self._parameter(np.zeros(of_keys))
        self.rate_in = self._linear(in_features, rate_rank, _zeros, rngs)
        self.rate_out = self._linear(rate_rank, of_keys, small, rngs)
        self.gate_in = self._linear(in_features, gate_rank, _zeros, rngs)
        self.gate_out = self._linear(gate_rank, inner, small, rngs)
        self.removal_scale = self._parameter(np.full(of_keys, 0.85))
        self.rate_scale = self._parameter(np.ones(of_keys))
        self.bonus = self._parameter(np.zeros((num_heads, self.head_dim)))

    def _mix(self, x, state, lengths, segment_ids):
        sums, before = (None, None) if state is None else state
        x, change, last = self._shifted(x, before, lengths, segment_ids)
        shifts = self.shifts[...].astype(x.dtype)[:, None, None]
        mixed = x[None] + change[None] * shifts
        of_receptance, of_decay, of_key, of_value, of_rate, of_gate = mixed
        wide = dtypes.wide(x.dtype)
        decay = self.decay_out(jnp.tanh(self.decay_in(of_decay))).astype(wide)
        log_decay = -np.exp(-0.5) * jax.nn.sigmoid(decay + lead(self.decay[...], 3).astype(wide))
        rate = self.rate_out(self.rate_in(of_rate)) + lead(self.rate[...], 3).astype(x.dtype)
        rate = jax.nn.sigmoid(rate)
        gate = self.gate_out(jax.nn.sigmoid(self.gate_in(of_gate)))
        key = self.key(of_key)
        removal = key * lead(self.removal_scale[...], 3).astype(x.dtype)
        removal = self._heads(removal, self.num_kv_heads)
        key = key * (1 + (rate - 1) * lead(self.rate_scale[...], 3).astype(x.dtype))
        key, value, rate, log_decay = (
            self._heads(each, self.num_kv_heads)
            for each in (key, self.value(of_value), rate, log_decay)
        )
        receptance = self._heads(self.receptance(of_receptance), self.num_heads)
        out, sums = rwkv7_attention(
            receptance,
            key,
            value,
            log_decay=log_decay,
            removal_key=_of_length_1(removal),
            learning_rate=rate,
            **self._options(sums, lengths, segment_ids),
        )
        key, value = (
            jnp.repeat(each, self.num_heads // self.num_kv_heads, 2) for each in (key, value)
        )
        products = receptance * lead(self.bonus[...], 4).astype(x.dtype) * key
        itself = (products.sum(-1, keepdims=True) * value).reshape(gate.shape)
        return self.out((self._normalised(out) + itself) * gate), (sums, last)


_zeros = nnx.initializers.zeros


def _small(key, shape, dtype):
    """Initializer: uniform in +-0.01."""
    return jax.random.uniform(key, shape, dtype, -0.01, 0.01)


def _of_length_1(x):
    """Vectors divided by their Euclidean norm; zero vectors stay zero, with a zero gradient."""
    wide = x.astype(dtypes.wide(x.dtype))
    squares = jnp.sum(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))).astype(x.dtype)
