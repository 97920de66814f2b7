"""Loader of Mamba-2 mixers."""

from collections.abc import Mapping
from typing import Any, Unpack

from effattn.nn.mamba2 import Mamba2
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.layer import Layer, filled, loader


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
    names = "A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight"
    read.expect((*names, "in_proj.weight", "out_proj.weight"))
    (heads,), (inner,) = read.shape("A_log", 1), read.shape("norm.weight", 1)
    features = read.shape("out_proj.weight", 2)[0]
    convolved, _, width = read.shape("conv1d.weight", 3)
    shared = convolved - inner
    if num_groups < 1 or inner % heads or heads % num_groups or shared % (2 * num_groups):
        raise ValueError(
            f"num_groups must divide the {heads} heads, and half of the {shared} features of B and "
            f"C, got {num_groups}; pass n_groups of the model's config"
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
