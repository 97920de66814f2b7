"""Loader for whole pretrained decoders of the Llama kind, from Hugging Face transformers."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks
from effattn.nn.configuration import TransformerConfig
from effattn.nn.language_model import TransformerLM
from effattn.nn.pretrained.layer import array_of, check_mapping, differences
from effattn.nn.rotary import RotaryEmbedding

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# The projections and norms within a layer: names here, and in transformers.
_PROJECTIONS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def decoder_from_transformers(
    parameters: Mapping[str, Any],
    config: Any,
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> TransformerLM:
    """Loads a pretrained decoder of the Llama kind into an equivalent `TransformerLM`.

        model = transformers.AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
        ours = decoder_from_transformers(model.state_dict(), model.config)

    These are models of the types llama, mistral, qwen2 and qwen3: RMS norms before the sublayers,
    rotary positions (plain, linear, yarn or llama3), grouped key heads, a SwiGLU feed-forward
    layer, and, where the configuration has them, biases, norms of queries and keys, and windows.

    Args:
      parameters: mapping of names to arrays: `model.state_dict()`, or the arrays of
        `safetensors.numpy.load_file`. Arrays may be from NumPy, JAX or torch, of floats of
        16, 32 or 64 bits.
      config: `model.config`, its `to_dict()`, or the mapping in the model's `config.json`.
      dtype: computation dtype; default `param_dtype`.
      param_dtype: dtype of the parameters.

    Returns:
      A `TransformerLM` whose logits are those of the model.

    Raises:
      ValueError: a model of another type, an option that effattn does not have, or a name that is
        missing, unexpected or has an array of another shape.
    """
    check_mapping(parameters)
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise ValueError(
            "config must be the configuration of a transformers model, or a mapping such as its "
            f"config.json, got {type(config).__name__}"
        )
    given = config if isinstance(config, Mapping) else config.to_dict()
    ours = _configuration(given, dtype, param_dtype)
    graph, state = nnx.split(nnx.eval_shape(lambda: TransformerLM(ours, rngs=nnx.Rngs(0))))
    variables = nnx.to_flat_state(state)
    names: dict[Any, str | None] = {path: _name(path) for path, _ in variables}
    if given["model_type"] == "qwen2":  # no bias after the heads
        names = {path: None if path[-2:] == ("out", "bias") else n for path, n in names.items()}
    _check_names(parameters, {name for name in names.values() if name is not None})
    if ours.tie_embeddings and "lm_head.weight" in parameters:
        _check_tied(parameters, (ours.vocab_size, ours.features))

    def loaded(path, variable):
        name, shape = names[path], variable.shape
        theirs: tuple[int, ...]
        if name is None:
            return jnp.zeros(shape, variable.dtype)
        if path[-1] == "kernel":
            # torch computes weight @ x, so the kernel is the transpose.
            features_in = math.prod(shape[:-1] if path[-2] == "out" else shape[:1])
            theirs = math.prod(shape) // features_in, features_in
            array = array_of(parameters, name, theirs).T
        else:
            theirs = shape if path[-1] == "embedding" else (math.prod(shape),)
            array = array_of(parameters, name, theirs)
        return jnp.asarray(array.reshape(shape), variable.dtype)

    filled = [(path, variable.replace(loaded(path, variable))) for path, variable in variables]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _configuration(given: Mapping[str, Any], dtype: Any, param_dtype: Any) -> TransformerConfig:
    kind = given.get("model_type")
    if kind not in _KINDS:
        raise ValueError(f"the model_type must be one of {', '.join(_KINDS)}, got {kind!r}")
    if given.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"hidden_act must be 'silu', got {given['hidden_act']!r}")
    missing = [name for name in _NEEDED if name not in given]
    if missing:
        raise ValueError(
            f"config must be that of the whole model, got one without {', '.join(missing)}"
        )
    for name in _NEEDED:
        checks.at_least(name, given[name], 1)
    features, heads = given["hidden_size"], given["num_attention_heads"]
    epsilon = checks.positive("rms_norm_eps", given.get("rms_norm_eps", 1e-6))
    if kind == "qwen3" and epsilon != 1e-6:
        raise ValueError(
            f"norms of queries and keys have the epsilon 1e-6 here, got rms_norm_eps={epsilon}"
        )
    bias = {"use_bias": kind == "qwen2" or bool(given.get("attention_bias", False))}
    return TransformerConfig(
        vocab_size=given["vocab_size"],
        num_layers=given["num_hidden_layers"],
        features=features,
        num_heads=heads,
        num_kv_heads=_size(given, "num_key_value_heads", heads),
        head_dim=_size(given, "head_dim", features // heads),
        hidden_features=given["intermediate_size"],
        norm_epsilon=epsilon,
        use_bias=bool(given.get("mlp_bias", False)),
        mixer=tuple({**mixer, **bias} for mixer in _mixers(given)),
        positions=_rotary(given),
        qk_norm=kind == "qwen3",
        tie_embeddings=bool(given.get("tie_word_embeddings", False)),
        dtype=dtype,
        param_dtype=param_dtype,
    )


def _size(given: Mapping[str, Any], name: str, default: int | None = None) -> Any:
    """An int, 1 or more, or the default for None and for a configuration without this name."""
    size = given.get(name)
    return default if size is None else checks.at_least(name, size, 1, "or None")


def _mixers(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The mixer of each layer: exact attention, or a window of the last tokens."""
    layers, window = given["num_hidden_layers"], _size(given, "sliding_window")
    full = _layers_before_windows(given)
    every = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    mixers: dict[str, dict[str, Any]] = {"full_attention": {"name": "softmax"}}
    if window is not None:
        # Their window counts the token itself.
        size = {"local_window_size": (window - 1, 0)}
        mixers["sliding_attention"] = {"name": "sliding_window", **size}
    kinds = every if given.get("layer_types") is None else given["layer_types"]
    is_list = isinstance(kinds, list | tuple) and len(kinds) == layers
    if not is_list or not all(kind in tuple(mixers) for kind in kinds):
        raise ValueError(
            f"layer_types must name one of {', '.join(mixers)} for each of {layers} layers, got "
            f"{kinds!r}"
        )
    return [mixers[kind] for kind in kinds]


def _layers_before_windows(given: Mapping[str, Any]) -> int:
    """Number of layers before those with a window, for a configuration without layer_types."""
    layers, kind = given["num_hidden_layers"], given["model_type"]
    is_qwen = kind in ("qwen2", "qwen3")
    is_used = given.get("use_sliding_window", not is_qwen)
    if kind == "llama" or given.get("sliding_window") is None or not is_used:
        return layers
    if not is_qwen:
        return 0
    before = given.get("max_window_layers", 28)
    return min(checks.at_least("max_window_layers", before, 0, "layers"), layers)


def _rotary(given: Mapping[str, Any]) -> RotaryEmbedding:
    """The rotary embedding, from `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    both = [given.get(name) for name in ("rope_parameters", "rope_scaling")]
    for rope in both:
        if not isinstance(rope, Mapping | None):
            raise ValueError(
                "rope_parameters or rope_scaling must be a mapping with rope_type and its numbers, "
                f"got {rope!r}"
            )
    ropes = [rope for rope in both if rope] or [{}]
    theta = ropes[0].get("rope_theta", given.get("rope_theta", 10000.0))
    first, *others = (_rotary_of({"rope_theta": theta, **rope}, given) for rope in ropes)
    if any(other != first for other in others):
        raise ValueError(
            "rope_parameters and rope_scaling must describe the same embedding if both are given, "
            f"got {both[0]} and {both[1]}; leave one of them out"
        )
    return first


def _rotary_of(rope: Mapping[str, Any], given: Mapping[str, Any]) -> RotaryEmbedding:
    """The rotary embedding of one mapping, which has `rope_theta`."""
    rule = rope.get("rope_type", rope.get("type", "default"))
    options: dict[str, Any] = {"theta": checks.positive("rope_theta", rope["rope_theta"])}
    fraction = rope.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    if fraction not in (None, 1.0):
        raise ValueError(
            "partial_rotary_factor must be 1, because models of these types rotate all features of "
            f"a head, got {fraction}"
        )
    if rule == "default":
        return RotaryEmbedding(**options)
    if rule not in ("linear", "yarn", "llama3"):
        raise ValueError(f"the rope_type must be default, linear, yarn or llama3, got {rule!r}")
    if "factor" not in rope:
        raise ValueError(f"the rope_type {rule} needs factor, a number, got {sorted(rope)}")
    options |= {"rule": rule, "scaling": checks.positive("rope factor", rope["factor"])}
    if rule == "linear":
        return RotaryEmbedding(**options)
    trained = rope.get("original_max_position_embeddings", given.get("max_position_embeddings"))
    if rule == "llama3":
        turns = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
        return RotaryEmbedding(**options, trained_length=trained, turns=turns)
    for name, known in (("truncate", True), ("mscale", None), ("mscale_all_dim", None)):
        if rope.get(name, known) not in (known, None):
            raise ValueError(f"the option {name} of yarn must be left out, got {rope[name]!r}")
    return RotaryEmbedding(
        **options,
        trained_length=trained,
        turns=(rope.get("beta_slow") or 1.0, rope.get("beta_fast") or 32.0),
        amplitude=rope.get("attention_factor"),
    )


def _name(path: tuple[Any, ...]) -> str:
    """The name in transformers of the parameter at a path here."""
    if path[0] != "blocks":
        whole = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
        return f"{whole[path[0]]}.weight"
    _, layer, part, *rest = path
    theirs = {
        "mixer_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    }.get(part)
    if theirs is None:
        prefix = "self_attn" if part == "mixer" else "mlp"
        theirs = f"{prefix}.{_PROJECTIONS[rest[0]]}"
    kind = "bias" if path[-1] == "bias" else "weight"
    return f"model.layers.{layer}.{theirs}.{kind}"


def _check_names(parameters: Mapping[str, Any], needed: set[str]) -> None:
    found = {name for name in parameters if not name.endswith("rotary_emb.inv_freq")}
    if "lm_head.weight" not in needed:  # the same array as the embedding
        found -= {"lm_head.weight"}
    wrong = differences(needed, found)
    if wrong:
        raise ValueError(f"parameters must be those of the model of this config; {wrong}")


def _check_tied(parameters: Mapping[str, Any], shape: tuple[int, int]) -> None:
    names = "lm_head.weight", "model.embed_tokens.weight"
    head, embedding = (array_of(parameters, name, shape) for name in names)
    if not np.array_equal(head, embedding, equal_nan=True):
        raise ValueError(
            f"{names[0]} must equal {names[1]}, because tie_word_embeddings of the config is True, "
            "got other values; pass a config with tie_word_embeddings=False to load both, or leave "
            f"out {names[0]}"
        )
