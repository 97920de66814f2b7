"""Loader of Fourier transforms of FNet."""

from collections.abc import Mapping
from typing import Any

from effattn.nn.fnet import FNet
from effattn.nn.pretrained.layer import Layer


def fnet_from_transformers(
    parameters: Mapping[str, Any], *, prefix: str = "", dtype: Any = None
) -> FNet:
    """Loads the Fourier transform of a pretrained FNet layer (`FNetFourierTransform`).

        mixer = fnet_from_transformers(model.state_dict(), prefix="encoder.layer.0.fourier.")

    The transform has no parameters: the loader reads the number of features from the layer's norm.
    The mixer returns the update that the layer adds to its input before the norm.

    Args:
      parameters: as in `mamba_from_transformers`.
      prefix: the part of the names before `output.LayerNorm.weight`.
      dtype: computation dtype; default None, the dtype of the input.

    Returns:
      An `FNet` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    read = Layer(parameters, prefix)
    read.expect(("output.LayerNorm.weight", "output.LayerNorm.bias"))
    (features,) = read.shape("output.LayerNorm.weight", 1)
    read("output.LayerNorm.bias", features)
    return FNet(features, dtype=dtype)
