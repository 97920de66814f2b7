"""Exchange of the attention mechanism of a trained model, with its projections kept."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn import registry
from effattn.arrays import checks
from effattn.nn.array_options import own_copy
from effattn.nn.block import build_mixer
from effattn.nn.build import Mechanism, named
from effattn.nn.build import mechanism as entry_of
from effattn.nn.configuration import TransformerConfig
from effattn.nn.encoder_decoder import EncoderDecoder
from effattn.nn.equality import same
from effattn.nn.hybrid import HybridHeads, SeveralMixers
from effattn.nn.recurrent_memory import RecurrentMemoryAttention
from effattn.nn.self_attention import SelfAttention
from effattn.nn.transformer import Transformer
from effattn.nn.transformer_xl import TransformerXLAttention

Model = TypeVar("Model", bound=nnx.Module)
Path = tuple[Any, ...]
Layers = int | Sequence[int] | None

_PROJECTIONS = ("query", "key", "value", "out")
_WITH_PROJECTIONS = (
    SelfAttention,
    SeveralMixers,
    RecurrentMemoryAttention,
    TransformerXLAttention,
)


class Conversion(NamedTuple):
    """Paths of parameters and other Variables, as in `nnx.to_flat_state`.

    Attributes:
      kept: Variables of the converted model that hold arrays of the original.
      new: Variables that only the converted model has, such as gates or random features.
      dropped: Variables that only the original has.
    """

    kept: tuple[Path, ...]
    new: tuple[Path, ...]
    dropped: tuple[Path, ...]


def convert(
    model: Model,
    mechanism: Mechanism,
    *,
    layers: Layers | Mapping[str, Layers] = None,
    rngs: nnx.Rngs | None = None,
) -> Model:
    """Returns a copy of a model whose attention has another mechanism, with the same projections.

        windowed = nn.convert(lm, {"name": "sliding_window", "local_window_size": (255, 0)})
        hybrid = nn.convert(lm, "gated_linear", layers=[0, 1, 2], rngs=nnx.Rngs(0))

    The new mixers keep the projections of queries, keys, values and outputs with their biases, the
    normalisation of queries and keys, the rotary embedding if the mechanism does not encode token
    order itself, and all other parameters that have the same path and shape in both mixers.
    `conversion` lists the parameters that were kept, added and dropped. Options of the old
    attention, such as `scale` and `dropout_rate`, are not kept: give them in `mechanism`.

    The original model does not change and shares no arrays with the copy. The `config` of the copy
    has the new mixers, so that the configuration alone describes the copy.

    Args:
      model: a `Transformer`, `TransformerLM` or `EncoderDecoder`, or one `SelfAttention` mixer,
        such as those of `effattn.nn.pretrained`.
      mechanism: a mechanism, as in `TransformerConfig.mixer`: a registered name, a mixer class, an
        attention function, a mapping of one of those and options, or a mapping of groups of heads.
      layers: indices of the layers to convert, from 0; None for all. For an `EncoderDecoder`, a
        mapping of "encoder", "decoder" or both to such indices; None for all layers of both. The
        cross-attention stays.
      rngs: random streams for parameters that the mechanism adds; may be None if it adds none.

    Raises:
      ValueError: a mechanism without such projections, or that needs other options; a layer whose
        mixer has no projections to keep; new parameters without `rngs`; a model of another kind.
    """
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"rngs must be nnx.Rngs, such as nnx.Rngs(0), or None, got {rngs!r}")
    if isinstance(model, SelfAttention):
        if layers is not None:
            raise ValueError(
                f"layers must be None for one mixer, got {layers!r}; give a model to convert some "
                "of its layers"
            )
        return _converted(own_copy(model), _config_of(model), 0, mechanism, rngs)[0]
    if not isinstance(model, (Transformer, EncoderDecoder)):
        raise ValueError(
            "model must be a Transformer, a TransformerLM, an EncoderDecoder or a SelfAttention, "
            f"got an object of type {type(model).__name__}; of another model, convert its "
            "SelfAttention modules"
        )
    copy: Any = own_copy(model)
    if isinstance(model, Transformer):
        if isinstance(layers, Mapping):
            raise ValueError(
                f"layers must be indices of layers or None for a {type(model).__name__}, got "
                f"{layers!r}"
            )
        _convert_stack(copy, mechanism, layers, rngs)
        return copy
    sides = dict.fromkeys(("encoder", "decoder")) if layers is None else layers
    if not isinstance(sides, Mapping) or not sides or sides.keys() - {"encoder", "decoder"}:
        raise ValueError(
            'layers must be a mapping of "encoder" or "decoder" to indices or None for an '
            f"EncoderDecoder, got {layers!r}"
        )
    for side, of_side in sides.items():
        _convert_stack(getattr(copy, side), mechanism, of_side, rngs)
    copy.config = dataclasses.replace(
        copy.config, encoder=copy.encoder.config, decoder=copy.decoder.config
    )
    copy.decoder.sides = copy.config
    return copy


def conversion(original: nnx.Module, converted: nnx.Module) -> Conversion:
    """Returns which parameters of a converted model were kept and which are new.

    To train the new parameters alone, give Flax a filter such as
    `lambda path, _: path in conversion(original, converted).new`.

    Args:
      original: the model given to `convert`.
      converted: the model that `convert` returned.
    """
    before, after = _flat(original), _flat(converted)
    sources = _sources(before, after)
    return Conversion(
        kept=tuple(sources),
        new=tuple(path for path in after if path not in sources),
        dropped=tuple(path for path in before if path not in sources.values()),
    )


def _convert_stack(stack, mechanism, layers, rngs):
    config, count = stack.config, len(stack.blocks)
    given = range(count) if layers is None else layers
    given = [given] if checks.is_integer(given) else given
    chosen = list(given) if np.iterable(given) else []
    if (
        not chosen
        or any(not checks.is_integer(layer) or not 0 <= layer < count for layer in chosen)
        or len(set(map(int, chosen))) < len(chosen)
    ):
        raise ValueError(
            f"layers must be different indices of layers, from 0 to {count - 1}, got {layers!r}"
        )
    if config.keys_from is not None:
        raise ValueError(
            "model must have keys_from=None: a new mixer of one layer would change the keys and "
            "values that other layers read"
        )
    mixers = config.mixer
    mixers = list(mixers) if isinstance(mixers, (list, tuple)) else [mixers] * count
    # The default of `positions` depends on the mixers.
    config = dataclasses.replace(config, positions=config.position_kind())
    for layer in map(int, chosen):
        block = stack.blocks[layer]
        block.mixer, mixers[layer] = _converted(block.mixer, config, layer, mechanism, rngs)
    are_alike = all(same(mixer, mixers[0]) for mixer in mixers)
    stack.config = dataclasses.replace(config, mixer=mixers[0] if are_alike else tuple(mixers))
    stack.config.position_kind()


def _converted(old, config, layer, description, rngs) -> tuple[Any, Mechanism]:
    """The new mixer of a layer, and its description with the options that keep the projections."""
    if not isinstance(old, SelfAttention):
        raise ValueError(
            f"the mixer of layer {layer} is a {type(old).__name__}, which has no projections of "
            "queries, keys and values to keep; leave the layer out of layers"
        )
    of_heads = isinstance(description, Mapping) and description.keys() == {"heads"}
    for one in description["heads"] if of_heads else [description]:
        _check_mechanism(one, old.is_causal)

    def build(description, rngs):
        own = own_copy(description)
        mixers = tuple(own if n == layer else "softmax" for n in range(config.num_layers))
        of_layer = dataclasses.replace(config, mixer=mixers)
        dtypes = {"dtype": old.dtype, "param_dtype": old.param_dtype}
        return build_mixer(of_layer, layer, rngs=rngs, **dtypes)

    plain = nnx.eval_shape(lambda: build(description, nnx.Rngs(0)))
    description = _with_traits(description, _traits(old), plain)
    new = build(description, nnx.Rngs(0) if rngs is None else rngs)
    before, after = _flat(old), _flat(new)
    arrays = {
        path: _part(before[source][...], path, new)
        for path, source in _sources(before, after).items()
    }
    arrays = {path: x for path, x in arrays.items() if x.shape == after[path].shape}
    _check_projections(old, new, arrays)
    added = sorted("/".join(map(str, path)) for path in after.keys() - arrays.keys())
    if added and rngs is None:
        raise ValueError(
            f"rngs must be nnx.Rngs, such as nnx.Rngs(0), as the mechanism {description!r} adds "
            f"{', '.join(added)}, got None"
        )
    for path, array in arrays.items():
        after[path].set_value(array)
    nnx.update(new, nnx.from_flat_state({path: after[path] for path in arrays}))
    return new, description


def _with_traits(description, kept, plain) -> Mechanism:
    """The description, with the traits of `kept` that differ from those of the mixer `plain`."""
    if isinstance(description, Mapping) and description.keys() == {"heads"}:
        sizes = [group["num_heads"] for group in description["heads"]]
        shared = sum(sizes) // kept["num_kv_heads"]
        if any(size % shared for size in sizes):
            raise ValueError(
                f"each group of heads must have a multiple of {shared} heads, as {shared} query "
                f"heads of the model share a key head, got groups of {sizes}"
            )
        groups = [
            _with_traits(group, {**kept, "num_kv_heads": size // shared}, mixer)
            for group, size, mixer in zip(description["heads"], sizes, plain.mixers, strict=True)
        ]
        return {"heads": groups}
    name, options = named("mechanism", description)
    if isinstance(plain, HybridHeads) or "num_heads" in options:
        # The head dimension follows from the model.
        kept = {trait: x for trait, x in kept.items() if trait != "head_dim"}
    traits: dict[str, Any] = {}
    for mixer in plain.mixers if isinstance(plain, SeveralMixers) else [plain]:
        if isinstance(mixer, SelfAttention):
            own = _traits(mixer)
            traits |= {n: x for n, x in kept.items() if own[n] != x and n not in options}
    if "head_dim" in traits and "value_dim" not in options:
        traits["value_dim"] = kept["value_dim"]  # its default follows head_dim
    if not entry_of(name).takes_rotary():
        traits.pop("rotary", None)
    return {"name": name, **options, **traits} if traits else description


def _traits(mixer: SelfAttention) -> dict[str, Any]:
    return {
        "num_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "value_dim": mixer.value_dim,
        "use_bias": mixer.query.use_bias,
        "qk_norm": mixer.query_norm is not None,
        "rotary": mixer.rotary,
    }


def _check_mechanism(description: Mechanism, is_causal: bool) -> None:
    """Raises `ValueError` for a registered mechanism whose mixer lacks the projections."""
    name, _ = named("mechanism", description)
    if isinstance(name, str) and not _has_projections(name):
        able = registry.names("causal" if is_causal else "bidirectional")
        raise ValueError(
            f"the mixer of {name!r} has no projections of queries, keys, values and outputs to "
            "take over; registered mechanisms whose mixers have them: "
            f"{', '.join(filter(_has_projections, able))}"
        )


def _has_projections(name: str) -> bool:
    mixer = registry.load(registry.get(name).builder)
    # The shapes decide on mixers of other packages, after they are built.
    return not mixer.__module__.startswith("effattn.") or issubclass(mixer, _WITH_PROJECTIONS)


def _check_projections(old, new, arrays) -> None:
    """Raises `ValueError` unless each part of the new mixer takes over all four projections."""
    parts: list[tuple[Path, Any]] = [((), new)]
    if isinstance(new, SeveralMixers):
        parts = [(("mixers", index), mixer) for index, mixer in enumerate(new.mixers)]
    for prefix, part in parts:
        for name in _PROJECTIONS:
            if (*prefix, name, "kernel") not in arrays:
                found = getattr(getattr(part, name, None), "kernel", None)
                needed = _part(getattr(old, name).kernel[...], (*prefix, name, "kernel"), new)
                raise ValueError(
                    f"the new mixer must have a projection {name!r} with a kernel of shape "
                    f"{needed.shape}, to take over that of the model, but "
                    f"{type(part).__name__} has "
                    f"{'none' if found is None else found.shape}; give it options of these sizes, "
                    "or choose another mechanism"
                )


def _sources(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> dict[Path, Path]:
    """The path in the old mixer or model of each Variable that the new one takes over.

    Parts of a mixer of several mixers take over Variables of the whole. A projection of a group of
    heads takes over the share of its heads.
    """
    sources = {}
    for path, variable in after.items():
        whole = path
        if "mixers" in path and path not in before:
            at = path.index("mixers")
            whole = path[:at] + path[at + 2 :]
        of_heads = whole != path and whole[-2] in _PROJECTIONS
        if whole in before and (of_heads or before[whole].shape == variable.shape):
            sources[path] = whole
    return sources


def _part(array: jax.Array, path: Path, new: Any) -> jax.Array:
    """A copy of the array for a Variable of the new mixer: for a group of heads, its share."""
    if isinstance(new, HybridHeads) and path[2] in _PROJECTIONS:
        sizes = [mixer.num_heads for mixer in new.mixers]
        first, heads = sum(sizes[: path[1]]), sum(sizes)
        if path[2:] == ("out", "bias"):  # the outputs of the groups are summed
            return array * (first == 0)
        axis = 1 if path[3] == "kernel" and path[2] != "out" else 0
        start, end = (n * array.shape[axis] // heads for n in (first, first + sizes[path[1]]))
        return jax.lax.slice_in_dim(array, start, end, axis=axis)
    return jnp.array(array)


def _config_of(mixer: SelfAttention) -> TransformerConfig:
    """Configuration of a model of one layer with this mixer."""
    return TransformerConfig(
        vocab_size=1,
        num_layers=1,
        features=mixer.in_features,
        num_heads=mixer.num_heads,
        # Only if needed: not every mixer takes it.
        head_dim=None if mixer.head_dim == mixer.in_features // mixer.num_heads else mixer.head_dim,
        positions="none",
        is_causal=mixer.is_causal,
    )


def _flat(module: Any) -> dict[Path, nnx.Variable]:
    return dict(nnx.to_flat_state(nnx.state(module)))
