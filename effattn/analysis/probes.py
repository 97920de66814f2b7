"""The weights with which mechanisms and trained layers mix values, read off with one-hot values.

The output of a mechanism is linear in the values and treats their features alike: y = W v, whether
W is ever formed or not. Given the identity as values, S features of S keys, it returns W itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from effattn.arrays import checks
from effattn.nn.attention import CrossAttention, SelfAttention
from effattn.nn.binding import resolve
from effattn.nn.transformer import TransformerLM
from effattn.patterns.characters import check_length


def mixing_weights(
    mechanism: str | Callable[..., Any], query: ArrayLike, key: ArrayLike, **options: Any
) -> jax.Array:
    """The weights with which a mechanism mixes values, for these queries and keys.

    For softmax attention over any pattern these are the attention weights; for other mechanisms
    the effective mixing matrix, whose entries may be negative and whose rows need not sum to 1.
    Time and memory O(T S) or more.

    Args:
      mechanism: a registered name, or a function of query, key and value, such as those of
        `effattn`, or a `functools.partial` of one.
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      **options: any other arguments of the function: `is_causal=True`, `local_window_size=(7, 0)`.
        Those not given are the registry's.

    Returns:
      `(*B, N, T, S)`, at least float32, row i the weights of query i over the keys.

    Raises:
      ValueError: an unknown mechanism, more than `LONGEST` tokens, or a function that does not
        return one array `(*B, T, N, Hv)`; and what the function raises.
    """
    function, _, options = resolve(mechanism, options)
    query, key = jnp.asarray(query), jnp.asarray(key)
    # Values have the shape of keys.
    return jax.jit(lambda q, k: _read(function, q, k, k, options))(query, key)


def attention_weights(
    module: nnx.Module, *inputs: ArrayLike, layer: int | None = None, **arguments: Any
) -> jax.Array:
    """The weights that the heads of a layer really give to each key, for these inputs.

    The module is run as it is, up to that layer, whose attention function gets one-hot values
    beside the queries, keys and further arguments that it would get. For softmax attention over any
    pattern this is the attention paid; for other mechanisms the effective mixing matrix, whose
    entries may be negative and whose rows need not sum to 1. Time and memory O(B N T S), beside
    those of the module.

    Args:
      module: a `SelfAttention`, `CrossAttention` or `TransformerLM` of `effattn.nn`.
      *inputs: what it is called with: tokens, `(B, T, D)` or `(B, T)` int.
      layer: of a `TransformerLM`, from 0 up, or from -1 down; None for the others.
      **arguments: further ones of the call, `lengths` and `segment_ids` say.

    Returns:
      `(B, N, T, S)`, at least float32.

    Raises:
      ValueError: another kind of module, a layer that it has not, one that normalises values or
        whose heads attend in several ways, or more than `LONGEST` tokens.
    """
    return probe(module, *inputs, layer=layer, **arguments).weights


class Probe(NamedTuple):
    """What a layer does: its weights, the name of its mechanism and whether that is a softmax."""

    weights: jax.Array
    name: str
    softmax: bool


def probe(module: nnx.Module, *inputs: ArrayLike, layer: int | None, **arguments: Any) -> Probe:
    """As `attention_weights`, with what is known of the mechanism."""
    binding = _mixer(module, layer).binding
    graph, state = nnx.split(module)

    @jax.jit
    def run(state):
        copy = nnx.merge(graph, state)
        if isinstance(copy, TransformerLM):
            # It changes no value, and hides what is seen inside of it.
            copy.config = dataclasses.replace(copy.config, remat=False, remat_policy=None)
        mixer, seen = _mixer(copy, layer), []
        attention = mixer.attention

        def attend(query, key, value, **keywords):
            seen.append(_read(attention, query, key, value, keywords))
            # What comes after makes no difference.
            return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)

        mixer.attention = attend
        copy(*map(jnp.asarray, inputs), **arguments)
        if not seen:
            raise ValueError(
                f"the heads of {type(mixer).__name__} attend in several ways, and not by one "
                "function whose weights could be read"
            )
        return seen[0]

    # A mechanism that has a log-sum-exp is one softmax over its keys, or over sums of them.
    sums = {"key_projection", "slot_scores"} & (binding.parameters or frozenset())
    softmax = "return_residual" in (binding.parameters or ()) and not sums
    return Probe(run(state), binding.name, softmax)


def _read(function: Callable[..., Any], query, key, value, keywords: dict[str, Any]) -> jax.Array:
    """`(*B, N, T, S)`, by the call of a function with the identity as value."""
    norms = [name for name in ("window_norm", "slot_norm") if keywords.get(name) is not None]
    if norms:
        raise ValueError(
            f"with {' and '.join(norms)} values are normalised, and outputs are not linear in "
            "them; LongShortSelfAttention has none with dual_norm=False"
        )
    keys = key.shape[-3]
    check_length("the number of tokens", max(query.shape[-3], keys))
    identity = jnp.eye(keys, dtype=jnp.promote_types(value.dtype, jnp.float32))[:, None, :]
    one_hot = jnp.broadcast_to(identity, (*value.shape[:-1], keys))
    return jnp.swapaxes(mixed(function, query, key, one_hot, keywords), -3, -2)


def mixed(function: Callable[..., Any], query, key, value, keywords: dict[str, Any]) -> jax.Array:
    """`(*B, T, N, C)`, the mixture of any values `(*B, S, K, C)`."""
    if "global_value" in keywords:
        # Values too, of another projection.
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
        raise ValueError(f"layer is for a TransformerLM, got {layer!r} and {type(module).__name__}")
    if not isinstance(mixer, SelfAttention | CrossAttention):
        raise ValueError(
            "module must be a SelfAttention or a CrossAttention of effattn.nn, or a TransformerLM "
            f"with one in that layer; got {type(mixer).__name__}"
        )
    return mixer
