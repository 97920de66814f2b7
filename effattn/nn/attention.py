"""Base class of modules around an attention function: projections and options."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from effattn.arrays import checks
from effattn.nn.array_options import check_holds_none, holds_data, own_copy, split, values
from effattn.nn.binding import bind
from effattn.nn.dropout import check_dropout_rate, dropout_key
from effattn.nn.heads import head_size, key_heads
from effattn.nn.layers import Layers
from effattn.nn.module import Module
from effattn.nn.options import Attending


class Attention(Module):
    """Base of `SelfAttention` and `CrossAttention`: projections and the attention function.

    `options` are those of `Attending`, and arguments of the attention function.
    """

    def __init__(
        self,
        in_features: int,
        context_features: int,
        num_heads: int,
        attention: str | Callable[..., Any],
        **options: Any,
    ):
        own = {n: options.pop(n) for n in Attending.__annotations__ if n in options}
        head_dim, value_dim = own.get("head_dim"), own.get("value_dim")
        head_dim = head_size(in_features, num_heads, head_dim)
        num_kv_heads = key_heads(num_heads, own.get("num_kv_heads"))
        function, binding, options = bind(attention, options, type(self))
        if num_kv_heads != num_heads:
            binding.require("grouped", f"num_kv_heads={num_kv_heads}")
        dropout_rate = own.get("dropout_rate", 0.0)
        check_dropout_rate(dropout_rate)
        if dropout_rate:
            binding.require("dropout", f"dropout_rate={dropout_rate}")

        self.in_features = checks.at_least("in_features", in_features, 1, "features")
        self.context_features = checks.at_least("context_features", context_features, 1, "features")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        value_dim = head_dim if value_dim is None else value_dim
        self.value_dim = checks.at_least("value_dim", value_dim, 1, "features")
        self.dropout_rate = dropout_rate
        make = Layers(**own)
        self.dtype, self.param_dtype = make.numbers["dtype"], make.param_dtype
        check_holds_none("attention", function)
        self.attention = own_copy(function)
        self.binding = binding
        static, learned = split(options)
        self.options = tuple(static.items())
        self.array_options = nnx.Dict({name: nnx.data(x) for name, x in learned.items()})
        bias = {"use_bias": own.get("use_bias", False)}
        self.query = make.heads(in_features, (num_heads, head_dim), **bias)
        self.key = make.heads(context_features, (num_kv_heads, head_dim), **bias)
        self.value = make.heads(context_features, (num_kv_heads, self.value_dim), **bias)
        self.out = make.out((num_heads, self.value_dim), in_features, **bias)
        qk_norm = own.get("qk_norm", False)
        self.query_norm = make.rms_norm(head_dim) if qk_norm else None
        self.key_norm = make.rms_norm(head_dim) if qk_norm else None

    def _project_queries(self, x: jax.Array, layer: Any = None) -> jax.Array:
        query = (layer or self.query)(x)
        return query if self.query_norm is None else self.query_norm(query)

    def _project_keys(
        self, context: jax.Array, of_key: Any = None, of_value: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        key, value = (of_key or self.key)(context), (of_value or self.value)(context)
        return key if self.key_norm is None else self.key_norm(key), value

    def _options(self) -> dict[str, Any]:
        """Arguments of the attention function that are the same in every call."""
        # Libraries that change models, such as qwix, set attributes of every module.
        learned = {name: x for name, x in self.array_options.items() if holds_data(x)}
        return {**dict(self.options), **values(learned)}

    def _dropout(self, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None) -> dict[str, Any]:
        key = dropout_key(rngs) if self.dropout_rate else None
        return {} if key is None else {"dropout_rate": self.dropout_rate, "dropout_rng": key}


def check_score_mod(score_mod: Any, num_heads: int, is_causal: bool) -> None:
    """Raises `ValueError` for a `score_mod` made for other heads, or for causal attention alone."""
    biased = getattr(score_mod, "num_heads", num_heads)
    if biased != num_heads:
        raise ValueError(
            f"score_mod must be for the {num_heads} heads of the layer, got one for {biased}"
        )
    if getattr(score_mod, "is_causal", False) and not is_causal:
        raise ValueError(
            f"score_mod must be for bidirectional attention, got a {type(score_mod).__name__} with "
            "is_causal=True, which does not tell keys after a query from keys before it; make it "
            "with is_causal=False, or the attention causal"
        )


def refuse(module: type, options: dict[str, Any], names: tuple[str, ...], advice: str) -> None:
    """Raises `ValueError` for arguments of the attention function that `module` makes itself."""
    given = [name for name in names if name in options]
    if given:
        raise ValueError(f"{module.__name__} has no option {', '.join(sorted(given))}; {advice}")
