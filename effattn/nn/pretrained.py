"""Loaders for pretrained attention layers of Hugging Face transformers."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.nn.longformer import LongformerSelfAttention
from effattn.nn.self_attention import SelfAttention

# Names of the projections to heads: in this library, and in transformers.
_LOCAL = {"query": "query", "key": "key", "value": "value"}
_GLOBAL = {
    "global_query": "query_global",
    "global_key": "key_global",
    "global_value": "value_global",
}
_NOT_LOADED = {"output.LayerNorm.weight", "output.LayerNorm.bias"}


def longformer_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    attention_window: int,
    max_global: int,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> LongformerSelfAttention:
    """Loads a pretrained Longformer attention layer into an equivalent module.

        model = transformers.AutoModel.from_pretrained("allenai/longformer-base-4096")
        mixer = longformer_from_transformers(
            model.state_dict(), prefix="encoder.layer.0.attention.", num_heads=12,
            attention_window=512, max_global=64)

    The mixer returns the update that `LongformerAttention` adds to its input: `output.dense` of the
    heads. The mixer does not contain the residual connection and `output.LayerNorm`. The argument
    `attention_mask` of transformers corresponds to `lengths` or `segment_ids`, and
    `global_attention_mask` to `global_mask`. Outputs at padding may differ from transformers.

    Args:
      parameters: mapping of names to arrays: a `state_dict()`, or the result of
        `safetensors.numpy.load_file`. Arrays may be from NumPy, JAX or torch.
      num_heads: `num_attention_heads` of the transformers config.
      attention_window: `attention_window` of this layer in the transformers config; even, half on
        each side.
      max_global: maximum number of global tokens per row; transformers counts them per batch.
      prefix: the part of the names before `self.query.weight` and `output.dense.weight`. If
        `query.weight` follows the prefix (the state of a `LongformerSelfAttention` of
        transformers), the module has no output projection and returns the concatenated heads.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.

    Returns:
      A bidirectional `LongformerSelfAttention` with biases and global projections.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    if attention_window < 2 or attention_window % 2:
        raise ValueError(
            f"attention_window must be even and at least 2, half for each side, got "
            f"{attention_window}"
        )
    layers = _read(parameters, prefix, {**_LOCAL, **_GLOBAL}, num_heads)
    mixer = LongformerSelfAttention(
        layers["out"]["bias"].size,
        num_heads,
        local_window_size=attention_window // 2,
        max_global=max_global,
        global_projections=True,
        is_causal=False,
        use_bias=True,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
    )
    return _fill(mixer, layers)


def bigbird_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    attention_type: str = "block_sparse",
    block_size: int = 64,
    num_random_blocks: int = 3,
    seed: int = 0,
    random_blocks: Any = None,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> SelfAttention:
    """Loads a pretrained BigBird attention layer into an equivalent module.

        model = transformers.AutoModel.from_pretrained("google/bigbird-roberta-base")
        mixer = bigbird_from_transformers(
            model.state_dict(), prefix="encoder.layer.0.attention.", num_heads=12)

    The mixer returns the update that `BigBirdAttention` adds to its input, as in
    `longformer_from_transformers`. The first and last blocks are global, and the window has three
    blocks.

    In training, transformers draws random blocks with NumPy for each length. The module agrees with
    transformers if it gets the same blocks as `random_blocks`; otherwise blocks are drawn from
    `seed`. The module differs from transformers in three cases:

    - In evaluation, transformers draws no random blocks, and instead counts the keys of the first
      block `num_random_blocks` more times. Here each key always counts once.
    - At 1024 tokens, the random blocks of transformers may contain the last block, which is
      already global and then counts twice.
    - Up to (5 + 2 `num_random_blocks`) `block_size` tokens, models of transformers use full
      attention for any config. Here only `attention_type="original_full"` does.

    Args:
      parameters: mapping of names to arrays, as in `longformer_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      attention_type: "block_sparse", or "original_full" for exact attention.
      block_size: `block_size` of the transformers config.
      num_random_blocks: `num_random_blocks` of the transformers config.
      seed: seed of the random blocks.
      random_blocks: int `(N, n, r)` for n blocks, replaces the draw, as in
        `effattn.bigbird_attention`. The arrays of transformers lack the first and last row.
      prefix: as in `longformer_from_transformers`.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.

    Returns:
      A bidirectional `SelfAttention` with biases.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    options: dict[str, Any] = {
        "original_full": {"attention": "softmax"},
        "block_sparse": {
            "attention": "bigbird",
            "block_size": block_size,
            "num_window_blocks": 3,
            "num_global_blocks": (1, 1),
            "num_random_blocks": num_random_blocks,
            "seed": seed,
        },
    }
    if attention_type not in options:
        raise ValueError(
            f"attention_type must be one of {', '.join(options)}, got {attention_type!r}"
        )
    chosen = options[attention_type]
    if random_blocks is not None:
        if attention_type == "original_full":
            raise ValueError(
                "random_blocks needs attention_type='block_sparse', got 'original_full'; leave out "
                "random_blocks or attention_type"
            )
        chosen["random_blocks"] = random_blocks
    layers = _read(parameters, prefix, _LOCAL, num_heads)
    mixer = SelfAttention(
        layers["out"]["bias"].size,
        num_heads,
        is_causal=False,
        use_bias=True,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
        **chosen,
    )
    return _fill(mixer, layers)


def _read(
    parameters: Mapping[str, Any], prefix: str, projections: Mapping[str, str], num_heads: int
) -> dict[str, dict[str, np.ndarray]]:
    """Kernel and bias of each projection and of `out`, in the shapes of this library.

    `projections` maps names of this library to names of transformers.
    """
    found = {name.removeprefix(prefix) for name in parameters if name.startswith(prefix)}
    alone = "query.weight" in found
    theirs = {ours: name if alone else f"self.{name}" for ours, name in projections.items()}
    if not alone:
        theirs["out"] = "output.dense"
    needed = {f"{name}.{kind}" for name in theirs.values() for kind in ("weight", "bias")}
    missing, unexpected = sorted(needed - found), sorted(found - needed - _NOT_LOADED)
    if missing or unexpected:
        raise ValueError(_advice(parameters, prefix, missing, unexpected))

    features = np.shape(parameters[f"{prefix}{theirs['query']}.weight"])[-1]
    if features % num_heads:
        raise ValueError(
            f"the layer's features ({features}, the last axis of {prefix}{theirs['query']}.weight) "
            f"must be a multiple of num_heads, got {num_heads}"
        )
    heads = (num_heads, features // num_heads)
    layers = {}
    for ours, name in theirs.items():
        # torch computes weight @ x, so the kernel is the transpose.
        weight = array_of(parameters, f"{prefix}{name}.weight", (features, features)).T
        bias = array_of(parameters, f"{prefix}{name}.bias", (features,))
        if ours == "out":
            layers[ours] = {"kernel": weight.reshape(*heads, features), "bias": bias}
        else:
            layers[ours] = {"kernel": weight.reshape(features, *heads), "bias": bias.reshape(heads)}
    if alone:
        identity = np.eye(features, dtype=np.float32).reshape(*heads, features)
        layers["out"] = {"kernel": identity, "bias": np.zeros(features, np.float32)}
    return layers


def array_of(parameters: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of a name, from NumPy, JAX or torch; `ValueError` if its shape is another one."""
    array = parameters[name]
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        # NumPy has no bfloat16; float32 represents every bfloat16 exactly.
        array = (array.float() if array.element_size() < 4 else array).numpy()
    array = np.asarray(array)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array


def _advice(
    parameters: Mapping[str, Any], prefix: str, missing: list[str], unexpected: list[str]
) -> str:
    """Error message about names under the prefix, with the prefixes of attention layers."""
    lists = (("missing", missing), ("unexpected", unexpected))
    wrong = "; ".join(f"{which}: {some(names)}" for which, names in lists if names)
    end = "self.query.weight"
    others = [name.removesuffix(end) for name in parameters if name.endswith(end)]
    others = [repr(other) for other in others if other != prefix]
    return (
        f"prefix {prefix!r} must lead to one attention layer of this kind; {wrong}"
        f"{'; attention layers are under the prefixes ' + some(others) if others else ''}"
    )


def some(names: list[str], most: int = 14) -> str:
    """The first `most` names, comma-separated."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _fill(mixer: Any, layers: Mapping[str, Mapping[str, np.ndarray]]) -> Any:
    """Replaces the module's parameters by these arrays; returns the module."""
    for layer, arrays in layers.items():
        for name, array in arrays.items():
            parameter = getattr(getattr(mixer, layer), name)
            parameter[...] = jnp.asarray(array, parameter[...].dtype)
    return mixer
