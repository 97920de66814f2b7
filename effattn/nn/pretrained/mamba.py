"""Loader of Mamba mixers."""

from collections.abc import Mapping
from typing import Any, Unpack

from effattn.nn.mamba import Mamba
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.layer import Layer, filled, loader


@loader
def mamba_from_transformers(
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> Mamba:
    """Loads a pretrained Mamba mixer (`MambaMixer` of transformers) into an equivalent module.

        model = transformers.AutoModel.from_pretrained("state-spaces/mamba-130m-hf")
        mixer = mamba_from_transformers(model.state_dict(), prefix="layers.0.mixer.")

    Args:
      parameters: mapping of names to arrays: a `state_dict()`, or the result of
        `safetensors.numpy.load_file`. Arrays may be from NumPy, JAX or torch, of floats of
        16, 32 or 64 bits.
      prefix: the part of the names before `in_proj.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A `Mamba` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    read = Layer(parameters, prefix, **dtypes)
    shapes = {
        "A_log": "inner states",
        "D": "inner",
        "conv1d.weight": "inner each width",
        "conv1d.bias": "inner",
        "dt_proj.weight": "inner rank",
        "dt_proj.bias": "inner",
        "in_proj.weight": "projected features",
        "x_proj.weight": "selected inner",
        "out_proj.weight": "features inner",
    }
    read.expect(shapes)
    size = read.sizes(shapes)
    inner, states, rank = size["inner"], size["states"], size["rank"]
    features, width = size["features"], size["width"]
    mixer = read.build(
        Mamba,
        features,
        head_dim=inner,
        state_size=states,
        step_rank=rank,
        convolution_width=width,
    )
    return filled(
        mixer,
        [
            (mixer.project.kernel, read.kernel("in_proj.weight", features, 2 * inner)),
            (mixer.convolution.taps, read.taps("conv1d.weight", inner, width)),
            (mixer.convolution.bias, read("conv1d.bias", inner)),
            (mixer.select.kernel, read.kernel("x_proj.weight", inner, rank + 2 * states)),
            (mixer.step_projection.kernel, read.kernel("dt_proj.weight", rank, inner)),
            (mixer.step_bias, read("dt_proj.bias", inner)),
            (mixer.log_rate, read("A_log", inner, states)),
            (mixer.skip, read("D", inner)),
            (mixer.out.kernel, read.kernel("out_proj.weight", inner, features)),
        ],
    )
