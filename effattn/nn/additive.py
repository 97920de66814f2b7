"""Additive self-attention and cross-attention modules, with the weights of the score network."""

from typing import Annotated, Any

import jax
from flax import nnx

from effattn.arrays import checks
from effattn.nn.attention import Attention, refuse
from effattn.nn.cross_attention import CrossAttention
from effattn.nn.layers import Layers
from effattn.nn.module import Module
from effattn.nn.options import Attending, SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention

_OWN = ("key_kernel", "query_kernel", "score")


class _Scores(Module):
    """Weights of the score network: W_q and W_k `(N, H, A)` and v_a `(N, A)`."""

    def __init__(self, num_heads: int, head_dim: int, hidden_dim: int | None, make: Layers):
        hidden = head_dim if hidden_dim is None else hidden_dim
        hidden = checks.at_least("hidden_dim", hidden, 1, "hidden numbers a head")
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.query_kernel = make.drawn(init, num_heads, head_dim, hidden)
        self.key_kernel = make.drawn(init, num_heads, head_dim, hidden)
        self.score = make.drawn(nnx.initializers.normal(hidden**-0.5), num_heads, hidden)

    def options(self) -> dict[str, jax.Array]:
        return {name: getattr(self, name)[...] for name in _OWN}


class _Additive(Attention):
    """Base of the two modules: the function's weights are parameters."""

    scores: _Scores

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), **self.scores.options()}


class AdditiveSelfAttention(_Additive, SelfAttention):
    """Mixer with additive attention (Bahdanau, Cho and Bengio 2014).

        q, k, v = x Wq, x Wk, x Wv
        y = additive_attention(q, k, v, query_kernel=W, key_kernel=W', score=s) Wo

    Args:
      hidden_dim: A, hidden size of the score network of each head; default H.
      **options: as in `SelfAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        hidden_dim: int | None = None,
        **options: SelfAttentionOptions,
    ):
        refuse(type(self), options, _OWN, "it learns the kernels and the score, of hidden_dim")
        super().__init__(in_features, num_heads, "additive", **options)
        self.scores = _Scores(num_heads, self.head_dim, hidden_dim, Layers(**options))


class AdditiveCrossAttention(_Additive, CrossAttention):
    """Additive attention from tokens to a context (Bahdanau, Cho and Bengio 2014).

    Args:
      in_features: D, number of features per query token.
      context_features: C, number of features per context token; default D.
      hidden_dim: A, hidden size of the score network of each head; default H.
      **options: as in `CrossAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        context_features: int | None = None,
        hidden_dim: int | None = None,
        **options: Annotated[Any, Attending],
    ):
        refuse(type(self), options, _OWN, "it learns the kernels and the score, of hidden_dim")
        options["context_features"] = context_features
        super().__init__(in_features, num_heads, "additive", **options)
        self.scores = _Scores(num_heads, self.head_dim, hidden_dim, Layers(**options))
