"""Removal of attention heads from a trained model."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.nn.array_options import own_copy
from effattn.nn.pipelined import PipelinedLM
from effattn.nn.self_attention import SelfAttention
from effattn.nn.transformer import Transformer

Model = TypeVar("Model", bound=Transformer)

# Heads of other mechanisms may differ by their index, such as in their decay or pattern.
_ALIKE = "softmax", "sliding_window"


def prune_heads(model: Model, keep: Sequence[Sequence[int]]) -> Model:
    """Returns a copy of a model with only some of its attention heads.

        smaller = nn.prune_heads(lm, [[0, 1, 3], [1, 2, 3]])   # 3 of 4 heads in both layers

    Its output is that of the model with zeros as the outputs of the other heads (Michel et al.
    2019, "Are Sixteen Heads Really Better than One?"), and it is smaller and faster. Its `config`
    describes it, and so all layers keep equally many heads. The head dimension stays.

    Args:
      model: a `Transformer` or `TransformerLM` with exact attention or attention in windows in all
        layers, without options that differ by head, such as `sink`.
      keep: for each layer, the indices of the key heads to keep, from 0, in increasing order. Query
        heads stay with their key head.

    Raises:
      ValueError: other indices, layers that keep different numbers of heads, or another model.
    """
    if not isinstance(model, Transformer) or isinstance(model, PipelinedLM):
        raise ValueError(
            f"model must be a Transformer without stages, got a {type(model).__name__}"
        )
    config = model.config
    if config.keys_from is not None:
        raise ValueError(
            "model must have keys_from=None: the heads of layers that share keys and values cannot "
            "be pruned for each layer alone"
        )
    heads, key_heads = config.num_heads, config.num_kv_heads or config.num_heads
    for layer, block in enumerate(model.blocks):
        _check_mixer(layer, block.mixer, (heads, key_heads))
    try:
        kept = [list(layer) for layer in keep]
    except TypeError:
        raise ValueError(f"keep must be a list of key heads for each layer, got {keep!r}") from None
    _check(kept, len(model.blocks), key_heads)
    count, each = len(kept[0]), heads // key_heads
    config = dataclasses.replace(
        config,
        mixer=own_copy(config.mixer),
        num_heads=count * each,
        num_kv_heads=count if config.num_kv_heads else None,
        head_dim=config.head_dim or config.features // heads,
    )
    smaller = type(model)(config, rngs=nnx.Rngs(0))
    before, after = (dict(nnx.to_flat_state(nnx.state(m))) for m in (model, smaller))
    path: Any
    for path, variable in after.items():
        array = jnp.array(before[path][...])
        if array.shape != variable.shape:
            array = _part(array, variable.shape, key_heads, jnp.asarray(kept[path[1]]))
        variable.set_value(array)
    nnx.update(smaller, nnx.from_flat_state(after))
    return smaller


def _check(kept, layers, key_heads):
    counts = {len(layer) for layer in kept}
    if len(kept) != layers or len(counts) > 1 or counts == {0}:
        raise ValueError(
            f"keep must name equally many heads, at least one, for each of the {layers} layers, "
            f"got {kept}"
        )
    for layer in kept:
        inside = all(checks.is_integer(head) and 0 <= head < key_heads for head in layer)
        if not inside or sorted(set(layer)) != layer:
            raise ValueError(
                f"keep must name key heads from 0 to {key_heads - 1} in increasing order, got "
                f"{layer}"
            )


def _check_mixer(layer, mixer, heads):
    name = mixer.binding.name if type(mixer) is SelfAttention else type(mixer).__name__
    if name not in _ALIKE:
        raise ValueError(
            f"the mixer of layer {layer} must be {' or '.join(_ALIKE)}, whose heads are alike, got "
            f"{name}"
        )
    if (mixer.num_heads, mixer.num_kv_heads) != heads:
        raise ValueError(
            f"the mixer of layer {layer} must have the heads of the configuration, {heads}; give "
            "num_kv_heads to TransformerConfig, not to the mixer"
        )
    options = dict(mixer.options)
    differs = [*mixer.array_options, *({"score_mod"} & options.keys())]
    if isinstance(options.get("dilation"), tuple):
        differs.append("dilation")
    if differs:
        raise ValueError(
            f"the mixer of layer {layer} must have no options that may differ by head, got "
            f"{', '.join(differs)}"
        )


def _part(array: jax.Array, shape: Any, heads: int, kept: jax.Array) -> jax.Array:
    """The share of these heads in an array, along the axis in which the shapes differ."""
    (axis,) = (axis for axis, n in enumerate(array.shape) if n != shape[axis])
    by_head = array.reshape(*array.shape[:axis], heads, -1, *array.shape[axis + 1 :])
    return jnp.take(by_head, kept, axis).reshape(shape)
