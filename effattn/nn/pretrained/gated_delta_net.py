"""Loader of Gated DeltaNet mixers of Qwen3-Next."""

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from effattn.arrays import checks
from effattn.nn.gated_delta_net import GatedDeltaNet
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.layer import Layer, filled, is_divisor, loader


@loader
def gated_delta_net_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_key_heads: int,
    norm_epsilon: float = 1e-6,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> GatedDeltaNet:
    """Loads a pretrained Gated DeltaNet of Qwen3-Next (`Qwen3NextGatedDeltaNet` of transformers).

        mixer = gated_delta_net_from_transformers(
            model.state_dict(), prefix="model.layers.0.linear_attn.",
            num_key_heads=model.config.linear_num_key_heads)

    In Qwen3-Next, several value heads share a query and a key, and have gates of their own. Here,
    each value head has its own copy of the query and key projections.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_key_heads: `linear_num_key_heads` of the transformers config.
      norm_epsilon: `rms_norm_eps` of the transformers config.
      prefix: the part of the names before `in_proj_qkvz.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A `GatedDeltaNet` with as many heads as there are value heads.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, an array has another shape, or
        sizes do not fit `num_key_heads`.
    """
    read = Layer(parameters, prefix, **dtypes)
    checks.positive("norm_epsilon", norm_epsilon)
    shapes = {
        "dt_bias": "heads",
        "A_log": "heads",
        "in_proj_qkvz.weight": "projected features",
        "in_proj_ba.weight": "gates features",
        "conv1d.weight": "convolved each width",
        "norm.weight": "value_dim",
        "out_proj.weight": "features inner",
    }
    read.expect(shapes)
    size = read.sizes(shapes)
    heads, value_dim, features = size["heads"], size["value_dim"], size["features"]
    convolved, width, inner = size["convolved"], size["width"], size["inner"]
    if inner != heads * value_dim:
        needs = f"have size {inner} / {heads}, features of out_proj.weight over heads of A_log"
        raise read.misshapen("norm.weight", needs)
    of_keys = convolved - inner
    if of_keys <= 0 or of_keys % 2:
        needs = f"have {inner} rows for values, and an even number, 2 or more, for queries and keys"
        raise read.misshapen("conv1d.weight", needs)
    if not is_divisor(num_key_heads, heads, of_keys // 2):
        raise ValueError(
            f"num_key_heads must divide the {heads} value heads, and half of the {of_keys} "
            f"features of queries and keys, got {num_key_heads!r}; pass linear_num_key_heads of "
            "the model's config"
        )
    shared, head_dim = heads // num_key_heads, of_keys // 2 // num_key_heads

    def of_value_heads(array):
        """Copies of `(..., key heads, H)` for the value heads that share them."""
        return np.repeat(array, shared, -2)

    both = read.kernel("in_proj_qkvz.weight", features, of_keys + 2 * inner)
    sizes = np.cumsum([head_dim, head_dim, shared * value_dim])
    query, key, value, gate = np.split(both.reshape(features, num_key_heads, -1), sizes, -1)
    gates = read.kernel("in_proj_ba.weight", features, 2 * heads)
    strength, step = np.split(gates.reshape(features, num_key_heads, 2 * shared), 2, -1)
    taps = read.taps("conv1d.weight", convolved, width)
    of_query, of_key, of_value = np.split(taps, [of_keys // 2, of_keys], -1)
    by_head = width, num_key_heads, head_dim
    mixer = read.build(
        GatedDeltaNet,
        features,
        heads,
        head_dim=head_dim,
        value_dim=value_dim,
        convolution_width=width,
    )
    mixer.norm.epsilon = norm_epsilon
    return filled(
        mixer,
        [
            (mixer.query.kernel, of_value_heads(query)),
            (mixer.key.kernel, of_value_heads(key)),
            (mixer.value.kernel, value),
            (mixer.gate.kernel, gate),
            (mixer.strength.kernel, strength),
            (mixer.step_size.kernel, step),
            (mixer.query_convolution.taps, of_value_heads(of_query.reshape(by_head))),
            (mixer.key_convolution.taps, of_value_heads(of_key.reshape(by_head))),
            (mixer.value_convolution.taps, of_value),
            (mixer.log_rate, read("A_log", heads)),
            (mixer.step_bias, read("dt_bias", heads)),
            (mixer.norm.scale, read("norm.weight", value_dim)),
            (mixer.out.kernel, read.kernel("out_proj.weight", inner, features)),
        ],
    )
