"""Mixer with the recurrent block of Griffin."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.cores import sequence_parts
from effattn.functional.rg_lru import SHARPNESS, rg_lru
from effattn.nn import activations
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.placement import axes
from effattn.nn.recurrent import RecurrentMixer
from effattn.nn.short_convolution import convolved


class RGLRU(RecurrentMixer):
    """Recurrent block of Griffin (De et al. 2024, "Griffin", section 2.3 and 2.4).

        u = convolution(x W_x + b_x);   r, i = sigmoid(u W_r + b_r), sigmoid(u W_i + b_i)
        y = (gelu_tanh(x W_g + b_g) * rg_lru(u, r, i, log a)) W_o + b_o,   log a = -softplus(rate)

    The matrices W_r and W_i of the gates are block-diagonal, one block for each head, as in
    RecurrentGemma. `convolution` is a short causal convolution of each feature. At the start a^8 is
    uniform in [0.9, 0.999].

    Args:
      num_heads: N, number of blocks of the gate matrices.
      head_dim: size of a block; the recurrence has N times `head_dim` features. Default D / N. The
        paper has 4 D / 3 features.
      convolution_width: width of the short convolution, in tokens.
      first_in_full: whether the first token of each document enters the state without the factor
        sqrt(1 - a_t^2) of `effattn.rg_lru`, as in RecurrentGemma.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "rg_lru"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        num_heads: int = 1,
        *,
        head_dim: int | None = None,
        convolution_width: int = 4,
        first_in_full: bool = False,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.num_heads = num_heads
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.first_in_full = first_in_full
        width = checks.at_least("convolution_width", convolution_width, 1, "tokens")
        make, inner = Layers(**options), num_heads * self.head_dim
        self.project = make.linear(in_features, inner, use_bias=True)
        self.gate = make.linear(in_features, inner, use_bias=True)
        self.convolution = make.convolution(inner, width, activation=None, use_bias=True)
        self.recurrence_gate, self.recurrence_bias = self._block_diagonal(make)
        self.input_gate, self.input_bias = self._block_diagonal(make)
        self.rate = make.drawn(_rate_init, inner)
        self.out = make.out(inner, in_features, use_bias=True)

    def _block_diagonal(self, make):
        """Weights `(N, H, H)` and biases `(N, H)` of a gate."""
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        shape = self.num_heads, self.head_dim, self.head_dim
        weights = make.drawn(init, *shape, **axes("heads", None, None))
        return weights, make.drawn(nnx.initializers.zeros, *shape[:2], **axes("heads", None))

    def _mix(self, x, state, lengths, segment_ids):
        if state is not None and len(state) != 2 + self.first_in_full:
            raise ValueError(
                f"state must be that of a layer with first_in_full={self.first_in_full}, of "
                f"{2 + self.first_in_full} arrays, got {len(state)}"
            )
        h, last, *begun = (None, None) if state is None else state
        if last is None:
            last = self.convolution.init_state(len(x), x.dtype)
        u, last = convolved(self.convolution, self.project(x), last, lengths, segment_ids)
        log_decay = -jax.nn.softplus(self.rate[...].astype(dtypes.wide(u.dtype)))
        recurrence_gate = self._gate(u, self.recurrence_gate, self.recurrence_bias)
        input_gate = self._gate(u, self.input_gate, self.input_bias)
        if self.first_in_full:
            is_first = sequence_parts.positions(x.shape[1], segment_ids) == 0
            is_first = jnp.broadcast_to(is_first, x.shape[:2])
            if begun:
                is_first &= ~begun[0][:, None]
            u = _in_full(u, recurrence_gate, log_decay, is_first)
        mixed, h = rg_lru(
            u,
            recurrence_gate,
            input_gate,
            log_decay=log_decay,
            lengths=lengths,
            segment_ids=segment_ids,
            initial_state=h,
            return_state=True,
        )
        y = self.out(activations.gelu_tanh(self.gate(x)) * mixed)
        if not self.first_in_full:
            return y, (h, last)
        reads = jnp.full(x.shape[:1], x.shape[1] > 0) if lengths is None else lengths > 0
        return y, (h, last, begun[0] | reads if begun else reads)

    def _gate(self, u, weights, bias):
        heads = u.reshape(*u.shape[:2], self.num_heads, self.head_dim)
        weights, bias = weights[...].astype(u.dtype), bias[...].astype(u.dtype)
        logits = jnp.einsum("btnh,nhg->btng", heads, weights) + bias[None, None]
        return jax.nn.sigmoid(logits).reshape(u.shape)


def _in_full(x, recurrence_gate, log_decay, is_first):
    """x `(B, T, D)` without the factor sqrt(1 - a^2) of the recurrence at the first tokens."""
    room = -jnp.expm1(2 * SHARPNESS * recurrence_gate.astype(log_decay.dtype) * lead(log_decay, 3))
    scaled = is_first[..., None] & (room > 0)
    return (x * jax.lax.rsqrt(jnp.where(scaled, room, 1))).astype(x.dtype)


def _rate_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Inverse softplus of -log a, for a^c uniform in [0.9, 0.999]."""
    rate = -jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.9, 0.999)) / SHARPNESS
    return jnp.log(jnp.expm1(rate)).astype(dtype)
