"""Mixing weights of mechanisms and of trained layers, measured with one-hot values.

The output of a mechanism is linear in the values and treats all value features alike: y = W v. With
the identity as values (S features of S keys), the output is W, even if the mechanism never forms W.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from effattn.arrays import checks
from effattn.nn.binding import resolve
from effattn.nn.cross_attention import CrossAttention
from effattn.nn.language_model import TransformerLM
from effattn.nn.self_attention import SelfAttention
from effattn.patterns.characters import check_length


def mixing_weights(
    mechanism: str | Callable[..., Any], query: ArrayLike, key: ArrayLike, **options: Any
) -> jax.Array:
    """Returns the weights with which a mechanism mixes values, for given queries and keys.

    For softmax attention over any pattern, the result is the attention weights. For other
    mechanisms it is the effective mixing matrix: entries may be negative, and rows need not sum to
    1. Time and memory O(T S) or more.

    Args:
      mechanism: a registered name, or a function of query, key and value, such as those of
        `effattn`, or a `functools.partial` of one.
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      **options: other arguments of the function, such as `is_causal=True`; the registry has the
        defaults.

    Returns:
      `(*B, N, T, S)`, at least float32; row i holds the weights of query i over the keys.

    Raises:
      ValueError: an unknown mechanism, more than `LONGEST` tokens, a function that does not return
        one array `(*B, T, N, Hv)`, or one whose outputs are not linear in the values. Errors of the
        function pass through.
    """
    function, _, options = resolve(mechanism, options)
    query, key = jnp.asarray(query), jnp.asarray(key)
    # Values have the shape of keys.
    return jax.jit(lambda q, k: _read(function, q, k, k, options))(query, key)


def attention_weights(
    module: nnx.Module, *inputs: ArrayLike, layer: int | None = None, **arguments: Any
) -> jax.Array:
    """Returns the weights of each head of a layer over the keys, for given inputs.

    The module runs unchanged up to the layer. The attention function of the layer then gets one-hot
    values, with the same queries, keys and other arguments as in the module. See `mixing_weights`
    for the meaning of the weights. Time and memory O(B N T S), in addition to those of the module.

    Args:
      module: a `SelfAttention`, `CrossAttention` or `TransformerLM` of `effattn.nn`.
      *inputs: inputs of the module: tokens, `(B, T, D)` or `(B, T)` int.
      layer: index of the layer of a `TransformerLM`, may be negative; None for other modules.
      **arguments: other arguments of the module, such as `lengths` and `segment_ids`.

    Returns:
      `(B, N, T, S)`, at least float32.

    Raises:
      ValueError: another kind of module; a layer index out of range; a layer that normalises values
        or whose heads use several attention functions; or more than `LONGEST` tokens.
    """
    return probe(module, *inputs, layer=layer, **arguments).weights


class Probe(NamedTuple):
    """Weights of a layer, the name of its mechanism, and whether the mechanism is a softmax."""

    weights: jax.Array
    name: str
    softmax: bool


def probe(module: nnx.Module, *inputs: ArrayLike, layer: int | None, **arguments: Any) -> Probe:
    """Returns `attention_weights` together with the name and kind of the mechanism."""
    binding = _mixer(module, layer).binding
    graph, state = nnx.split(module)

    @jax.jit
    def run(state):
        copy = nnx.merge(graph, state)
        if isinstance(copy, TransformerLM):
            # Rematerialisation changes no value, but its tracers must not leave the inner function.
            copy.config = dataclasses.replace(copy.config, remat=False, remat_policy=None)
        mixer, seen = _mixer(copy, layer), []
        attention = mixer.attention

        def attend(query, key, value, **keywords):
            seen.append(_read(attention, query, key, value, keywords))
            # Later layers do not affect the result.
            return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)

        mixer.attention = attend
        copy(*map(jnp.asarray, inputs), **arguments)
        if not seen:
            raise ValueError(
                "the heads of module must attend by one function, whose weights can be read, got "
                f"a {type(mixer).__name__} whose heads attend in several ways"
            )
        return seen[0]

    # A mechanism with a log-sum-exp is one softmax over its keys, or over projected keys.
    sums = {"key_projection", "slot_scores"} & (binding.parameters or frozenset())
    softmax = "return_residual" in (binding.parameters or ()) and not sums
    return Probe(run(state), binding.name, softmax)


def _read(function: Callable[..., Any], query, key, value, keywords: dict[str, Any]) -> jax.Array:
    """Returns the weights `(*B, N, T, S)`, by a call of the function with identity values."""
    if "norm_scale" in keywords:
        raise ValueError(
            "weights exist for mechanisms whose outputs are linear in the values, got one that "
            "normalises what it predicts of the values (norm_scale)"
        )
    norms = [name for name in ("window_norm", "slot_norm") if keywords.get(name) is not None]
    if norms:
        raise ValueError(
            f"{' and '.join(norms)} must be None, because outputs are not linear in normalised "
            "values, got arrays; make LongShortSelfAttention with dual_norm=False"
        )
    keys = key.shape[-3]
    check_length("the number of tokens", max(query.shape[-3], keys))
    identity = jnp.eye(keys, dtype=jnp.promote_types(value.dtype, jnp.float32))[:, None, :]
    one_hot = jnp.broadcast_to(identity, (*value.shape[:-1], keys))
    return jnp.swapaxes(mixed(function, query, key, one_hot, keywords), -3, -2)


def mixed(function: Callable[..., Any], query, key, value, keywords: dict[str, Any]) -> jax.Array:
    """Returns the output `(*B, T, N, C)` for any values `(*B, S, K, C)`."""
    if "global_value" in keywords:
        # `global_value` holds values too, by another projection.
        keywords = {**keywords, "global_value": value}
    out = function(query, key, value, **keywords)
    shape = (*query.shape[:-1], value.shape[-1])
    if not isinstance(out, jax.Array) or out.shape != shape:
        got = getattr(out, "shape", type(out).__name__)
        raise ValueError(
            f"the mechanism must return one array of shape {shape} for values {value.shape}, "
            f"got {got}"
        )
    return out


def _mixer(module: Any, layer: int | None) -> SelfAttention | CrossAttention:
    mixer = module
    if isinstance(module, TransformerLM):
        count = len(module.blocks)
        if layer is None or not checks.is_integer(layer) or not -count <= layer < count:
            raise ValueError(
                f"layer must be an int from {-count} to {count - 1}, for a model of {count} "
                f"layers; got {layer!r}"
            )
        mixer = module.blocks[layer].mixer
    elif layer is not None:
        raise ValueError(
            f"layer needs a TransformerLM, got layer={layer!r} and a {type(module).__name__}; "
            "leave layer out"
        )
    if not isinstance(mixer, SelfAttention | CrossAttention):
        raise ValueError(
            "module must be a SelfAttention or a CrossAttention of effattn.nn, or a TransformerLM "
            f"with one in that layer; got {type(mixer).__name__}"
        )
    return mixer
