"""Loader of latent attention of DeepSeek-V2."""

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from effattn.arrays import checks
from effattn.nn.latent import LatentAttention
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.layer import Layer, filled, is_divisor, loader
from effattn.nn.rotary import RotaryEmbedding


@loader
def latent_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    head_dim: int,
    rotary: RotaryEmbedding | None = None,
    scale: float | None = None,
    norm_epsilon: float = 1e-6,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> LatentAttention:
    """Loads pretrained latent attention of DeepSeek-V2 (`DeepseekV2Attention` of transformers).

        mixer = latent_from_transformers(
            model.state_dict(), prefix="model.layers.0.self_attn.", num_heads=16,
            head_dim=model.config.qk_nope_head_dim)

    The model rotates the pairs of neighbouring features; here the features of each pair lie half a
    head apart, so the loader reorders the rotary features of queries and keys.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      head_dim: `qk_nope_head_dim` of the transformers config.
      rotary: the rotary embedding of the model; default `RotaryEmbedding()`. It needs
        `amplitude=1.0` for YaRN with equal `mscale` and `mscale_all_dim`, as in DeepSeek-V2.
      scale: `scaling` of the transformers layer, which differs from the default in models with a
        YaRN `mscale_all_dim`; default 1 over the square root of the features of a query head.
      norm_epsilon: epsilon of the norms of the latents.
      prefix: the part of the names before `kv_b_proj.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A causal `LatentAttention`. The factor of another `scale` is part of its query projection.

    Raises:
      ValueError: a name under the prefix is missing or unexpected (biases, too), an array has
        another shape, or sizes do not fit `num_heads` and `head_dim`.
    """
    read = Layer(parameters, prefix, **dtypes)
    compressed = read.has("q_a_proj.weight")
    shapes = {
        "kv_b_proj.weight": "expanded rank",
        "kv_a_layernorm.weight": "rank",
        "o_proj.weight": "features of_heads",
        "kv_a_proj_with_mqa.weight": "projected features",
    }
    if compressed:
        shapes["q_a_proj.weight"] = "query_rank features"
        shapes["q_b_proj.weight"] = "queries query_rank"
        shapes["q_a_layernorm.weight"] = "query_rank"
    else:
        shapes["q_proj.weight"] = "queries features"
    read.expect(shapes)
    checks.at_least("head_dim", head_dim, 1, "features")
    checks.positive("norm_epsilon", norm_epsilon)
    size = read.sizes(shapes)
    rank, features, of_heads = size["rank"], size["features"], size["of_heads"]
    rotary_dim = size["projected"] - rank
    if rotary_dim < 2 or rotary_dim % 2:
        needs = f"have {rank} rows for the latent, and an even number, 2 or more, for rotary keys"
        raise read.misshapen("kv_a_proj_with_mqa.weight", needs)
    if not is_divisor(num_heads, of_heads):
        raise ValueError(
            f"num_heads must divide the {of_heads} features of {prefix}o_proj.weight, got "
            f"{num_heads!r}; pass num_attention_heads of the model's config"
        )
    value_dim, query_dim = of_heads // num_heads, head_dim + rotary_dim
    query_rank = size.get("query_rank")
    factor = 1.0 if scale is None else checks.scale(scale, query_dim) * query_dim**0.5
    mixer = read.build(
        LatentAttention,
        features,
        num_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        rotary_dim=rotary_dim,
        kv_rank=rank,
        query_rank=query_rank,
        rotary=RotaryEmbedding() if rotary is None else rotary,
    )

    def halves(array):
        """The features (0, 1), (2, 3), ... of pairs as two halves, (0, 2, ...) and (1, 3, ...)."""
        return np.concatenate([array[..., ::2], array[..., 1::2]], -1)

    name = "q_b_proj.weight" if compressed else "q_proj.weight"
    kernel = read.kernel(name, query_rank or features, num_heads * query_dim)
    plain, turned = np.split(kernel.reshape(-1, num_heads, query_dim), [head_dim], -1)
    latent = read.kernel("kv_a_proj_with_mqa.weight", features, rank + rotary_dim)
    expand = read.kernel("kv_b_proj.weight", rank, num_heads * (head_dim + value_dim))
    key, value = np.split(expand.reshape(rank, num_heads, head_dim + value_dim), [head_dim], -1)
    mixer.latent_norm.epsilon = norm_epsilon
    arrays = [
        (mixer.query.kernel, factor * np.concatenate([plain, halves(turned)], -1)),
        (mixer.latent.kernel, latent[:, :rank]),
        (mixer.rotary_key.kernel, halves(latent[:, rank:])),
        (mixer.latent_norm.scale, read("kv_a_layernorm.weight", rank)),
        (mixer.key.kernel, key),
        (mixer.value.kernel, value),
        (mixer.out.kernel, read.kernel("o_proj.weight", of_heads, features)),
    ]
    if mixer.query_latent is not None and mixer.query_norm is not None:
        assert query_rank is not None
        mixer.query_norm.epsilon = norm_epsilon
        arrays += [
            (mixer.query_latent.kernel, read.kernel("q_a_proj.weight", features, query_rank)),
            (mixer.query_norm.scale, read("q_a_layernorm.weight", query_rank)),
        ]
    return filled(mixer, arrays)
