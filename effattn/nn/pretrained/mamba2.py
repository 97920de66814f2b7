"""Loader of Mamba-2 mixers."""

from collections.abc import Mapping
from typing import Any, Unpack

from effattn.arrays import checks
from effattn.nn.mamba2 import Mamba2
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.layer import Layer, filled, is_divisor, loader


@loader
def mamba2_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_groups: int,
    norm_epsilon: float = 1e-5,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> Mamba2:
    """Loads a pretrained Mamba-2 mixer (`Mamba2Mixer` of transformers) into an equivalent module.

        mixer = mamba2_from_transformers(
            model.state_dict(), prefix="backbone.layers.0.mixer.", num_groups=model.config.n_groups)

    Args:
      parameters: as in `mamba_from_transformers`.
      num_groups: `n_groups` of the transformers config.
      norm_epsilon: `layer_norm_epsilon` of the transformers config.
      prefix: the part of the names before `in_proj.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A `Mamba2` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, an array has another shape, or
        sizes do not fit `num_groups`.
    """
    read = Layer(parameters, prefix, **dtypes)
    checks.positive("norm_epsilon", norm_epsilon)
    shapes = {
        "A_log": "heads",
        "D": "heads",
        "dt_bias": "heads",
        "in_proj.weight": "projected features",
        "conv1d.bias": "convolved",
        "conv1d.weight": "convolved each width",
        "out_proj.weight": "features inner",
        "norm.weight": "inner",
    }
    read.expect(shapes)
    size = read.sizes(shapes)
    heads, inner, features = size["heads"], size["inner"], size["features"]
    convolved, width = size["convolved"], size["width"]
    if inner % heads:
        raise read.misshapen("norm.weight", f"have a size divisible by the {heads} heads")
    shared = convolved - inner
    if shared <= 0 or shared % 2:
        needs = f"have {inner} rows for x, and an even number, 2 or more, for B and C"
        raise read.misshapen("conv1d.weight", needs)
    if not is_divisor(num_groups, heads, shared // 2):
        raise ValueError(
            f"num_groups must divide the {heads} heads, and half of the {shared} features of B and "
            f"C, got {num_groups!r}; pass n_groups of the model's config"
        )
    mixer = read.build(
        Mamba2,
        features,
        heads,
        head_dim=inner // heads,
        state_size=shared // 2 // num_groups,
        num_kv_heads=num_groups,
        convolution_width=width,
    )
    mixer.norm.epsilon = norm_epsilon
    projected = inner + convolved + heads
    return filled(
        mixer,
        [
            (mixer.project.kernel, read.kernel("in_proj.weight", features, projected)),
            (mixer.convolution.taps, read.taps("conv1d.weight", convolved, width)),
            (mixer.convolution.bias, read("conv1d.bias", convolved)),
            (mixer.log_rate, read("A_log", heads)),
            (mixer.step_bias, read("dt_bias", heads)),
            (mixer.skip, read("D", heads)),
            (mixer.norm_scale, read("norm.weight", inner)),
            (mixer.out.kernel, read.kernel("out_proj.weight", inner, features)),
        ],
    )
