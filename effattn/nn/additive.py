"""Additive self-attention and cross-attention modules, with the weights of the score network."""

from typing import Any

import jax
from flax import nnx

from effattn.arrays import checks
from effattn.nn.attention import CrossAttention, SelfAttention
from effattn.nn.module import Module

_OWN = ("key_kernel", "query_kernel", "score")


def _check(layer: type, options: dict[str, Any]) -> None:
    given = [name for name in _OWN if name in options]
    if given:
        raise ValueError(
            f"{layer.__name__} has no option {', '.join(given)}; it learns its own, of hidden_dim"
        )


class _Scores(Module):
    """Weights of the score network: W_q and W_k `(N, H, A)` and v `(N, A)`."""

    def __init__(self, num_heads, head_dim, hidden_dim, param_dtype, rngs):
        hidden = head_dim if hidden_dim is None else hidden_dim
        hidden = checks.at_least("hidden_dim", hidden, 1, "hidden numbers a head")
        init = nnx.initializers.lecun_normal(batch_axis=0)
        shape = num_heads, head_dim, hidden
        self.query_kernel = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.key_kernel = nnx.Param(init(rngs.params(), shape, param_dtype))
        score = nnx.initializers.normal(hidden**-0.5)(rngs.params(), shape[::2], param_dtype)
        self.score = nnx.Param(score)

    def options(self) -> dict[str, jax.Array]:
        return {name: getattr(self, name)[...] for name in _OWN}


class AdditiveSelfAttention(SelfAttention):
    """Mixer with additive attention (Bahdanau, Cho and Bengio 2014).

        q, k, v = x Wq, x Wk, x Wv
        y = additive_attention(q, k, v, query_kernel=W, key_kernel=W', score=s) Wo

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of query heads.
      hidden_dim: A, hidden size of the score network of each head; default H.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `SelfAttention` (`num_kv_heads`, `rotary`, ...).

    Raises:
      ValueError: as `SelfAttention`, and for `hidden_dim` below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        hidden_dim: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        _check(type(self), options)
        super().__init__(in_features, num_heads, "additive", rngs=rngs, **options)
        self.scores = _Scores(num_heads, self.head_dim, hidden_dim, self.param_dtype, rngs)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), **self.scores.options()}


class AdditiveCrossAttention(CrossAttention):
    """Additive attention from tokens to a context (Bahdanau, Cho and Bengio 2014).

    Args:
      in_features: D, number of features per query token.
      num_heads: N, number of query heads.
      hidden_dim: A, hidden size of the score network of each head; default H.
      rngs: random streams for parameter initialisation.
      **options: all other arguments of `CrossAttention` (`context_features`, ...).

    Raises:
      ValueError: as `CrossAttention`, and for `hidden_dim` below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        hidden_dim: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        _check(type(self), options)
        super().__init__(in_features, num_heads, "additive", rngs=rngs, **options)
        self.scores = _Scores(num_heads, self.head_dim, hidden_dim, self.param_dtype, rngs)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), **self.scores.options()}
