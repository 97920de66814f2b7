"""Mixer with the time mixing of RWKV-7."""

import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.decode.state import new_lengths
from effattn.functional.rwkv7 import rwkv7_attention
from effattn.nn import initializers
from effattn.nn.layers import Layers
from effattn.nn.options import Recurrent
from effattn.nn.time_mixing import TimeMixing
from effattn.nn.tokens import padding_of, tokens_of, zero_padding

_zeros = nnx.initializers.zeros


class RWKV7(TimeMixing):
    """Time mixing of RWKV-7 (Peng et al. 2025, "RWKV-7 Goose", section 4.1).

    x' is the previous token. Each input c (receptance, decay, key, value, rate, gate) is the
    interpolation x_c = x + (x' - x) mu_c, and

        r, k, v = x_r W_r, x_k W_k, x_v W_v
        log w = -exp(-1/2) sigmoid(w_0 + tanh(x_w A_w) B_w)
        a = sigmoid(a_0 + x_a A_a B_a);   g = sigmoid(x_g A_g) B_g
        kappa = normalised(k xi);   k~ = k (1 + (a - 1) alpha)
        p = norm(rwkv7_attention(r, k~, v, log w, kappa, a)) + (r . (rho k~)) v
        y = (p g) W_o

    `normalised`, `norm` and the product with r act on each head. In models with the paper's value
    residual, a layer after the first mixes the values of the first layer into its own,

        v = v + (v_first - v) sigmoid(v_0 + x_v A_v B_v)

    `with_shared` and `extend_with_shared` take and return the values of the first layer; other
    calls are those of a first layer. `TransformerConfig(value_residual=True)` makes such models.

    Args:
      head_dim: H, head dimension; default D / N. The paper has 64.
      num_kv_heads: K, number of key, value and decay heads, a divisor of N; default N (paper).
      decay_rank: rank of A_w B_w.
      rate_rank: rank of A_a B_a.
      gate_rank: rank of A_g B_g.
      value_residual: whether the layer mixes the values of the first layer into its own.
      value_rank: rank of A_v B_v.
      depth: relative depth of the layer, 0 (first) to 1 (last); sets initial parameters.
      **options: see `effattn.nn.options.Recurrent`.
    """

    _mechanism = "rwkv7"

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
        value_residual: bool = False,
        value_rank: int = 32,
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
        decay_rank = checks.at_least("decay_rank", decay_rank, 1, "features")
        rate_rank = checks.at_least("rate_rank", rate_rank, 1, "features")
        gate_rank = checks.at_least("gate_rank", gate_rank, 1, "features")
        value_rank = checks.at_least("value_rank", value_rank, 1, "features")
        make = Layers(**options)
        inner, of_keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        small = functools.partial(initializers.orthogonal_init, scale=0.1)
        # Initial values of the authors' code.
        place = np.arange(in_features) / in_features
        powers = np.array([0.2, 0.9, 0.7, 0.7, 0.9, 0.2]) * (1 - depth)
        self.shifts = make.constant(1 - place ** powers[:, None])
        feature = np.arange(of_keys) / max(of_keys - 1, 1)
        self.decay = make.constant(-6.5 + 5 * feature ** (0.85 + depth**0.5))
        self.decay_in = make.linear(in_features, decay_rank, kernel_init=_zeros)
        self.decay_out = make.linear(decay_rank, of_keys, kernel_init=small)
        self.rate = make.constant(np.zeros(of_keys))
        self.rate_in = make.linear(in_features, rate_rank, kernel_init=_zeros)
        self.rate_out = make.linear(rate_rank, of_keys, kernel_init=small)
        self.gate_in = make.linear(in_features, gate_rank, kernel_init=_zeros)
        self.gate_out = make.linear(gate_rank, inner, kernel_init=small)
        self.removal_scale = make.constant(np.full(of_keys, 0.85))
        self.rate_scale = make.constant(np.ones(of_keys))
        self.bonus = make.constant(np.zeros((num_heads, self.head_dim)))
        self.value_residual = value_residual
        if value_residual:
            self.value_share = make.constant(np.ones(of_keys))
            self.value_in = make.linear(in_features, value_rank, kernel_init=_zeros)
            self.value_out = make.linear(value_rank, of_keys, kernel_init=small)

    def with_shared(
        self,
        x: jax.Array,
        shared: jax.Array | None = None,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Mixes whole sequences, with the values of the first layer.

        Args:
          x: `(B, T, D)`.
          shared: `(B, T, K, H)`, the values of the first layer; None in that layer.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, packed sequences; 0 is padding.
          rngs: changes nothing, because there is no dropout.

        Returns:
          `(y (B, T, D), values)`, the values of the first layer; y is zero in the padding.
        """
        x = tokens_of("x", x, self.in_features)

        def mix(mixer, x, values, lengths, segment_ids):
            batch, time = x.shape[:2]
            _, valid = padding_of(mixer.binding, batch, time, lengths, segment_ids)
            x = zero_padding(x, valid)
            y, _, values = mixer._mix_values(x, None, lengths, segment_ids, values)
            return zero_padding(y, valid), values

        specs = PartitionSpec(*mesh_axes.spec(x)), PartitionSpec(*mesh_axes.spec(x)[:2])
        return mesh_axes.placed(mix, x, *specs)(self, x, shared, lengths, segment_ids)

    def extend_with_shared(
        self,
        x: jax.Array,
        state: Any,
        shared: jax.Array | None = None,
        *,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, jax.Array]:
        """Mixes new tokens as `extend` does, with the values of the first layer for these tokens.

        Args:
          x: `(B, T, D)`.
          state: decode state, from `init_state` or an earlier call.
          shared: `(B, T, K, H)`, the values of the first layer; None in that layer.
          lengths: `(B,)` int, valid tokens among the T of each right-padded row; default T.

        Returns:
          `(y (B, T, D), state, values)`.
        """
        return self._extended(x, state, lengths, shared, further=1)

    def _extend(self, x, state, lengths, *shared):
        more = new_lengths(lengths, *x.shape[:2])
        y, after, values = self._mix_values(x, state.state, lengths, None, *shared)
        after = dataclasses.replace(state, state=after, length=state.length + more)
        return (y, after, values) if shared else (y, after)

    def _mix(self, x, state, lengths, segment_ids):
        return self._mix_values(x, state, lengths, segment_ids)[:2]

    def _mix_values(self, x, state, lengths, segment_ids, values=None):
        """Returns the output, the state, and the values of the first layer."""
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
        value = self.value(of_value)
        if values is not None:
            if not self.value_residual:
                raise ValueError(
                    "shared must be None in a layer with value_residual=False, got an array"
                )
            shape = *x.shape[:2], self.num_kv_heads, self.head_dim
            values = checks.shaped("shared", values, shape)
            share = self.value_out(self.value_in(of_value))
            share = share + lead(self.value_share[...], 3).astype(share.dtype)
            first = values.reshape(value.shape).astype(value.dtype)
            value = value + (first - value) * jax.nn.sigmoid(share)
        key, value, rate, log_decay = (
            self._heads(each, self.num_kv_heads) for each in (key, value, rate, log_decay)
        )
        values = value if values is None else values
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
        return self.out((self._normalised(out) + itself) * gate), (sums, last), values


def _of_length_1(x):
    """Vectors divided by their Euclidean norm; zero vectors stay zero, with a zero gradient."""
    wide = dtypes.widen(x)
    squares = jnp.sum(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))).astype(x.dtype)
