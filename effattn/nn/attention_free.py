"""Mixers of the attention-free transformer (AFT)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import within
from effattn.functional.attention_free import attention_free, biased_average, check_bias
from effattn.nn import initializers
from effattn.nn.cached import CachedMixer
from effattn.nn.mixer import CausalMixer
from effattn.nn.recurrent import RecurrentMixer

# As in the paper, section 4.
bias_init = nnx.initializers.normal(0.01)


class _AFT(CausalMixer):
    """Base class of the AFT mixers: y = attention_free(x W_q, x W_k, x W_v, w) W_o."""

    _name: str

    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        *,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            self._name,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )

        def linear(init):
            return nnx.Linear(
                in_features,
                in_features,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

        self.query, self.key, self.value = (linear(kernel_init) for _ in range(3))
        self.out = linear(kernel_init if out_kernel_init is None else out_kernel_init)


class AFTSimple(_AFT, RecurrentMixer):
    """AFT without position biases (Zhai et al. 2021, "An Attention Free Transformer").

        y = attention_free(x W_q, x W_k, x W_v) W_o

    Time is O(T D^2); the decode state has 3 D numbers per row.

    Args:
      in_features: D, number of features per token.
      is_causal: token t reads tokens 0 to t only.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: an option that the mechanism does not support.
    """

    _name = "aft_simple"

    def _mix(self, x, state, lengths, segment_ids):
        with_state = {"initial_state": state, "return_state": True} if self.is_causal else {}
        mixed = attention_free(
            *(project(x) for project in (self.query, self.key, self.value)),
            is_causal=self.is_causal,
            lengths=lengths,
            segment_ids=segment_ids,
            **with_state,
        )
        y, state = mixed if self.is_causal else (mixed, None)
        return self.out(y), state


class _BiasedAFT(_AFT, CachedMixer):
    """Base class of AFT mixers with a bias per pair of positions.

    The decode state caches all keys and values. A step costs O(S D); many tokens at once, such as a
    prompt, cost as much as a whole sequence of S tokens.
    """

    window: int | None = None

    def _bias(self) -> Any:
        """The `position_bias` argument of `attention_free`."""
        raise NotImplementedError

    def _bias_at(self, position: jax.Array, capacity: int) -> jax.Array:
        """Biases `(B, S, 1 or D)` of the queries at `position (B,)` over all cache slots."""
        raise NotImplementedError

    def _mix_all(self, x, lengths, segment_ids):
        y = attention_free(
            *(project(x) for project in (self.query, self.key, self.value)),
            position_bias=self._bias(),
            local_window_size=self.window,
            is_causal=self.is_causal,
            lengths=lengths,
        )
        return self.out(y)

    def _prepare(self, x, positions):
        return (self.key(x), self.value(x)), self.query(x)

    def _mix_at(self, tokens, own, positions):
        dtype = own.dtype
        key, value = (x.astype(dtypes.wide(dtype)) for x in tokens)
        capacity, features = key.shape[1:]

        def of_token(at):
            """Average `(B, D)` of one token per row; the weights are `(B, S, D)`."""
            seen = within(at + 1, capacity)[..., None]
            bias = self._bias_at(at, capacity).astype(key.dtype)
            exponent = jnp.where(seen, key + bias, dtypes.lowest(key.dtype))
            weights = jax.nn.softmax(exponent, 1)
            return (weights * value).sum(1)

        # The form for whole sequences computes all pairs, at several times less cost per pair.
        few = capacity // 8 if self.window is None else 2 * (self.window + 1)
        if isinstance(positions.shape[1], int) and positions.shape[1] <= few:
            average = jnp.moveaxis(lax.map(of_token, positions.T), 0, 1)
        else:
            bias = check_bias(self._bias(), self.window, True, capacity, features, key.dtype)
            whole = biased_average(key, value, None, bias, self.window, True)
            average = jnp.take_along_axis(whole, positions[..., None], 1, mode="clip")
        return self.out((jax.nn.sigmoid(own.astype(key.dtype)) * average).astype(dtype))


class AFTFull(_BiasedAFT):
    """AFT with a bias per pair of positions (Zhai et al. 2021, sections 3.1 and 4).

        y = attention_free(x W_q, x W_k, x W_v, w) W_o,   w_ts = u_t . c_s

    The biases are factorised, as in the paper. Time is O(T^2 D), memory O(T D).

    Args:
      in_features: D, number of features per token.
      max_length: number of positions with factors; maximum number of tokens per row.
      rank: R, size of the factors u_t and c_s.
      is_causal: token t reads tokens 0 to t only.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support; in calls,
        more tokens than `max_length`.
    """

    _name = "aft_full"

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        rank: int = 128,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
        )
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        shape = (max_length, checks.at_least("rank", rank, 1, "features"))
        self.row_bias, self.column_bias = (
            nnx.Param(bias_init(rngs.params(), shape, param_dtype)) for _ in range(2)
        )

    def _empty(self, batch, max_length, dtype):
        if max_length > self.max_length:
            raise ValueError(
                f"max_length={max_length} was asked for, and there are biases for "
                f"max_length={self.max_length}"
            )
        return super()._empty(batch, max_length, dtype)

    def _bias(self):
        return self.row_bias[...], self.column_bias[...]

    def _bias_at(self, position, capacity):
        row, column = self._bias()
        slots = jnp.arange(capacity)
        bias = jnp.take(row, position, 0, mode="clip") @ jnp.take(column, slots, 0, mode="clip").T
        if self.window is not None:
            bias = jnp.where(position[:, None] - slots[None] <= self.window, bias, 0)
        return bias[..., None]


class AFTLocal(AFTFull):
    """AFT with biases in a window (Zhai et al. 2021, section 3.2).

    As `AFTFull`, with w_ts = 0 if t and s are more than `local_window_size` apart: tokens outside
    the window contribute without a bias. Time is O(T W D).

    Args:
      in_features: D, number of features per token.
      max_length: number of positions with factors; maximum number of tokens per row.
      local_window_size: W, maximum distance of a pair with a bias.
      rank: R, size of the factors u_t and c_s.
      is_causal: token t reads tokens 0 to t only.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: as `AFTFull`.
    """

    _name = "aft_local"

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        local_window_size: int = 31,
        rank: int = 128,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            max_length=max_length,
            rank=rank,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
        )
        self.window = checks.at_least("local_window_size", local_window_size, 0, "tokens")


class AFTConv(_BiasedAFT):
    """AFT with biases that depend on the distance (Zhai et al. 2021, section 3.3).

    As `AFTLocal`, with w_ts = taps_(t - s). Each head (a group of features) has its own taps. Time
    is O(T W D); the length is not limited.

    Args:
      in_features: D, number of features per token.
      num_heads: G, number of feature groups, a divisor of D.
      local_window_size: W, number of taps on each side of the token.
      is_causal: token t reads tokens 0 to t only.
      dropout_rate: must be 0; the mechanism has no attention weights to drop.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      rngs: random streams for parameter initialisation.

    Raises:
      ValueError: inconsistent sizes, or an option that the mechanism does not support.
    """

    _name = "aft_conv"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        local_window_size: int = 31,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
        )
        checks.at_least("num_heads", num_heads, 1, "heads")
        if in_features % num_heads:
            raise ValueError(
                f"in_features ({in_features}) must be a multiple of num_heads ({num_heads})"
            )
        self.window = checks.at_least("local_window_size", local_window_size, 0, "tokens")
        shape = (num_heads, (1 if is_causal else 2) * local_window_size + 1)
        self.taps = nnx.Param(bias_init(rngs.params(), shape, param_dtype))

    def _bias(self):
        return self.taps[...]

    def _bias_at(self, position, capacity):
        distance = position[:, None] - jnp.arange(capacity)[None]
        taps = jnp.take(self.taps[...], distance, 1, mode="clip")
        taps = jnp.where(distance <= self.window, taps, 0)
        return jnp.repeat(jnp.moveaxis(taps, 0, -1), self.in_features // len(self.taps[...]), -1)
