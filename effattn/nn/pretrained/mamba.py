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
        `safetensors.numpy.load_file`. Arrays may be from NumPy, JAX or torch.
      prefix: the part of the names before `in_proj.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A `Mamba` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    read = Layer(parameters, prefix, **dtypes)
    names = "A_log", "D", "conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias"
    read.expect((*names, "in_proj.weight", "x_proj.weight", "out_proj.weight"))
    inner, states = read.shape("A_log", 2)
    features, width = read.shape("out_proj.weight", 2)[0], read.shape("conv1d.weight", 3)[2]
    rank = read.shape("dt_proj.weight", 2)[1]
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
