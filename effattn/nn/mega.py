"""Mixer with the attention of Mega: in chunks, gated, and on a moving average of the tokens."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.angles import angles
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from
from effattn.cores import chunk_attention, diagonal_spaces, sequence_parts, token_mixing
from effattn.cores.chunk_attention import Keys
from effattn.cores.diagonal_spaces import Rows, Space
from effattn.decode import decoder, ring
from effattn.decode.ring import RingState
from effattn.decode.state import new_lengths
from effattn.nn.layers import Layers
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import Projected

RELATIVE_BIASES = ("simple", "rotary")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MegaState:
    """Decode state of constant size.

    Attributes:
      average: `(B, D, h)`, the moving averages, in at least float32.
      tokens: keys and values of the last c - 1 tokens.
    """

    average: jax.Array
    tokens: RingState

    @property
    def length(self) -> jax.Array:
        """`(B,)` int32, tokens seen."""
        return self.tokens.length


class Mega(CausalMixer):
    """Gated attention of one head in chunks, whose queries and keys read a moving average.

    Ma et al. 2022, "Mega: Moving Average Equipped Gated Attention". The moving average of a feature
    has h dimensions, with decays and inputs of their own, and all other terms follow from it:

        u_t = (1 - a d) * u_(t-1) + a b x_t;   x'_t = silu(e . u_t / sqrt(h) + w x_t)
        z = silu(x' W_z + b_z);   q = kappa_q * z + mu_q;   k = kappa_k * z + mu_k
        v = silu(x W_v + b_v);    o_t = sum_s f(q_t . k_s / tau + bias_(s - t)) v_s
        g = silu(x' W_g + b_g);   p = sigmoid(x' W_p + b_p)
        y = p * silu(x' W_y + (g * o) W_o + b_y) + (1 - p) * x

    a and d are sigmoids of the parameters alpha and delta; b, e and w are beta, eta and omega. The
    sum is over the tokens s in the chunk of token t. f is the softmax, with tau = sqrt(Z), or the
    Laplace function of each logit, with tau the number of these tokens. With `is_causal=False`, a
    second moving average reads the tokens from the last one on. Time is O(T D (c + h + log T)),
    memory O(T (D + c)), and the decode state has D h + (c - 1) (Z + V) numbers per row.

    Args:
      chunk_length: c, tokens in a chunk, counted from the start of a document. A chunk that holds
        the whole sequence is Mega without chunks.
      ema_dim: h, dimensions of the moving average of a feature.
      shared_dim: Z, size of queries and keys; default D / 4, rounded up to an even number.
      value_dim: V, size of values; default 2 D.
      attention_function: f, "softmax" or "laplace".
      relative_bias: "simple" learns a bias for each distance in a chunk; "rotary" takes that of a
        distance from two learned vectors, whose rotary embeddings are multiplied, with an even Z.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: a size or name that does not fit, or the errors of `effattn.nn.options`.
    """

    _mechanism = "mega"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        *,
        chunk_length: int = 128,
        ema_dim: int = 16,
        shared_dim: int | None = None,
        value_dim: int | None = None,
        attention_function: str = "softmax",
        relative_bias: str = "rotary",
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.chunk_length = checks.at_least("chunk_length", chunk_length, 1, "tokens")
        self.ema_dim = checks.at_least("ema_dim", ema_dim, 1, "dimensions")
        if shared_dim is None:
            shared_dim = 2 * -(-in_features // 8)
        self.shared_dim = checks.at_least("shared_dim", shared_dim, 1, "features")
        self.value_dim = 2 * in_features
        if value_dim is not None:
            self.value_dim = checks.at_least("value_dim", value_dim, 1, "features")
        checks.one_of("attention_function", attention_function, chunk_attention.FUNCTIONS)
        checks.one_of("relative_bias", relative_bias, RELATIVE_BIASES)
        if relative_bias == "rotary" and shared_dim % 2:
            raise ValueError(
                "shared_dim must be even with relative_bias='rotary', which rotates pairs of "
                f"features, got {shared_dim}; choose an even number, or relative_bias='simple'"
            )
        self.attention_function, self.relative_bias = attention_function, relative_bias

        make, normal = Layers(**options), nnx.initializers.normal
        sides = 1 if self.is_causal else 2
        sizes = sides, in_features, ema_dim
        self.alpha, self.delta = (make.drawn(normal(0.2), *sizes) for _ in range(2))
        self.beta = make.drawn(normal(0.02), *sizes)
        # Inputs of alternate signs, as in the authors' code.
        self.beta[...] = self.beta[...] + jnp.asarray(
            (-1.0) ** np.arange(ema_dim), self.param_dtype
        )
        self.eta = make.drawn(normal(1.0), *sizes)
        self.omega = make.drawn(normal(1.0), in_features)
        self.shared, self.value, self.reset, self.update, self.candidate = (
            make.linear(in_features, size, use_bias=True)
            for size in (self.shared_dim, self.value_dim, self.value_dim, in_features, in_features)
        )
        self.kappa = make.drawn(normal(0.02), 2, self.shared_dim)
        self.mu = make.constant(np.zeros((2, self.shared_dim)))
        self.out = make.out(self.value_dim, in_features)
        distances = chunk_length if self.is_causal else 2 * chunk_length - 1
        shape = (distances,) if relative_bias == "simple" else (2, self.shared_dim)
        self.position_bias = make.drawn(normal(0.02), *shape)

    def _mix_all(self, x, lengths, segment_ids):
        x, rows = self._rows(x, lengths, segment_ids)
        averaged, _ = self._averaged(x, None, rows)
        query, key, value = self._heads(x, averaged)
        if segment_ids is None:
            sequence_parts.check_blocks("chunks", self.chunk_length, x.shape[1])
            chunk = None if rows.valid is None else rows.valid.astype(jnp.int32)
            keys = Keys(key, value, chunk)
        else:
            position = sequence_parts.positions(x.shape[1], jnp.asarray(segment_ids))
            keys = self._of_documents(key, value, position, rows.valid)
        return self._finished(x, averaged, query, keys)

    def _rows(self, x, lengths, segment_ids=None):
        """The tokens, and their padding and documents."""
        x, *given = token_mixing.check("Mega", {"x": x}, lengths=lengths, segment_ids=segment_ids)
        return x, Rows(*given)

    def _of_documents(self, key, value, position, present):
        """Keys of packed documents, also those of tokens before and after each tile of queries."""
        reach = min(self.chunk_length, max(key.shape[1], 1)) - 1
        if sequence_parts.current() is not None:
            reach = self.chunk_length - 1
        after = 0 if self.is_causal else reach

        def around(x):
            x = sequence_parts.with_tokens_before(x, reach)
            return jnp.pad(x, ((0, 0), (0, after), *[(0, 0)] * (x.ndim - 2)))

        key, value, position, present = map(around, (key, value, position, present))
        chunk = chunk_attention.numbers(position, present, self.chunk_length)
        return Keys(key, value, chunk, reach)

    def _empty(self, batch, max_length, dtype):
        sizes = decoder.Sizes(batch, max_length, 1, self.shared_dim, self.value_dim, dtype)
        shape, wide = (batch, self.in_features, self.ema_dim), dtypes.wide(dtype, self.param_dtype)
        return MegaState(jnp.zeros(shape, wide), ring.empty(self.chunk_length - 1, sizes))

    def _extend(self, x, state, lengths):
        more, kept = new_lengths(lengths, *x.shape[:2]), state.tokens.key.shape[1]
        x, rows = self._rows(x, lengths)
        averaged, average = self._averaged(x, state.average, rows)
        query, key, value = self._heads(x, averaged)
        key, value, filled, tokens = ring.append(
            state.tokens, key[:, :, None], value[:, :, None], more, self.chunk_length - 1
        )
        position = positions_from(state.length - kept, key.shape[1])
        chunk = chunk_attention.numbers(position, filled, self.chunk_length)
        keys = Keys(key[:, :, 0], value[:, :, 0], chunk, kept)
        y = self._finished(x, averaged, query, keys)
        return y, MegaState(average.astype(state.average.dtype), tokens)

    def _averaged(self, x: jax.Array, state: Any, rows: Rows) -> tuple[jax.Array, Any]:
        """The moving average x' `(B, T, D)`, and the state after it if causal."""
        dtype = self._computed_in(x)
        wide = dtypes.wide(dtype)
        x, after = x.astype(wide), None
        spaces = [Space(*each) for each in zip(*self._of_average(wide), strict=True)]
        if self.is_causal:
            state = None if state is None else state.astype(wide)
            mixed, after = diagonal_spaces.mix("Mega", x, spaces[0], state, rows)
        else:
            mixed = diagonal_spaces.mix_both_ways("Mega", x, spaces[0], spaces[1], rows)
        mixed = token_mixing.cleared(mixed, rows.valid)
        omega = self.omega[...].astype(wide)
        return jax.nn.silu(mixed + lead(omega, 3) * x).astype(dtype), after

    def _of_average(self, dtype):
        """Logarithms of decays, inputs and outputs of the moving averages, each `(#2, D, h)`."""
        names = "alpha", "delta", "beta", "eta"
        alpha, delta, beta, eta = (getattr(self, name)[...].astype(dtype) for name in names)
        # log(1 - sigmoid(alpha) sigmoid(delta)), exact for decays near 0 and near 1.
        one = jnp.logaddexp(jnp.logaddexp(alpha, delta), 0)
        logs = -jax.nn.softplus(alpha + delta - one)
        return logs, jax.nn.sigmoid(alpha) * beta, eta / self.ema_dim**0.5

    def _heads(self, x, averaged):
        """Queries and keys `(B, T, Z)`, and values `(B, T, V)`."""
        z = jax.nn.silu(self.shared(averaged))
        query, key = (
            lead(kappa, 3) * z + lead(mu, 3)
            for kappa, mu in zip(
                *(p[...].astype(z.dtype) for p in (self.kappa, self.mu)), strict=True
            )
        )
        return query, key, jax.nn.silu(self.value(x))

    def _finished(self, x, averaged, query, keys):
        """Outputs `(B, T, D)` of the tokens x, from their queries and the keys."""
        attended = chunk_attention.attend(
            query,
            keys,
            self._biases(dtypes.wide(query.dtype)),
            self.chunk_length,
            self.attention_function,
            is_causal=self.is_causal,
        )
        reset = jax.nn.silu(self.reset(averaged))
        update = jax.nn.sigmoid(self.update(averaged))
        candidate = jax.nn.silu(self.candidate(averaged) + self.out(reset * attended))
        x = x.astype(candidate.dtype)
        return update * candidate + (1 - update) * x

    def _biases(self, dtype: Any) -> jax.Array:
        """Biases of the distances from -(c - 1) to c - 1, or to 0 if causal."""
        learned, size = self.position_bias[...].astype(dtype), self.chunk_length
        if self.relative_bias == "simple":
            return learned
        half = self.shared_dim // 2
        distance = jnp.arange(1 - size, 1 if self.is_causal else size)
        frequency = 10000.0 ** (-np.arange(half) / half)
        angle = angles(distance[:, None], frequency[None], dtype)
        # Pairs of features are complex numbers. The rotation of a query by s angles and of a key by
        # t angles is that of the product by t - s angles.
        (real, imaginary), (of_key, other) = learned.reshape(2, 2, half)
        cos = real * of_key + imaginary * other
        sin = imaginary * of_key - real * other
        wave = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)
        return jnp.matmul(wave, jnp.concatenate([cos, sin]), precision="highest")
