"""Loader of attention layers of Longformer."""

from collections.abc import Mapping
from typing import Any, Unpack

from effattn.arrays import checks
from effattn.nn.longformer import LongformerSelfAttention
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.attention import PROJECTIONS, checked, with_layers
from effattn.nn.pretrained.layer import Layer, loader

# Names of the global projections: in this library, and in transformers.
_GLOBAL = {f"global_{name}": f"{name}_global" for name in PROJECTIONS}


@loader
def longformer_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    attention_window: int,
    max_global: int,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
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
        `safetensors.numpy.load_file`. Arrays may be from NumPy, JAX or torch, of floats of
        16, 32 or 64 bits.
      num_heads: `num_attention_heads` of the transformers config.
      attention_window: `attention_window` of this layer in the transformers config; even, half on
        each side.
      max_global: maximum number of global tokens per row; transformers counts them per batch.
      prefix: the part of the names before `self.query.weight` and `output.dense.weight`. If
        `query.weight` follows the prefix (the state of a `LongformerSelfAttention` of
        transformers), the module has no output projection and returns the concatenated heads.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A bidirectional `LongformerSelfAttention` with biases and global projections.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    if not checks.is_integer(attention_window) or attention_window < 2 or attention_window % 2:
        raise ValueError(
            f"attention_window must be even and at least 2, half for each side, got "
            f"{attention_window!r}"
        )
    read = Layer(parameters, prefix, **dtypes)
    layers, features = checked(read, {**PROJECTIONS, **_GLOBAL}, num_heads)
    mixer = read.build(
        LongformerSelfAttention,
        features,
        num_heads,
        local_window_size=attention_window // 2,
        max_global=max_global,
        global_projections=True,
        is_causal=False,
        use_bias=True,
    )
    return with_layers(read, mixer, layers, features)
