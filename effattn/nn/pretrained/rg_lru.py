"""Loader of recurrent blocks of RecurrentGemma."""

from collections.abc import Mapping
from typing import Any, Unpack

from effattn.nn.options import Dtypes
from effattn.nn.pretrained.layer import Layer, filled, loader
from effattn.nn.rg_lru import RGLRU


@loader
def rg_lru_from_transformers(
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> RGLRU:
    """Loads a pretrained recurrent block of RecurrentGemma (`RecurrentGemmaRecurrentBlock`).

        mixer = rg_lru_from_transformers(
            model.state_dict(), prefix="model.layers.0.temporal_block.")

    Args:
      parameters: as in `mamba_from_transformers`.
      prefix: the part of the names before `linear_x.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      An `RGLRU` with `first_in_full`.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    layers = {"project": "linear_x", "gate": "linear_y", "out": "linear_out"}
    gates = {"recurrence": "rg_lru.recurrent_gate", "input": "rg_lru.input_gate"}
    kinds = "weight", "bias"
    names = [f"{name}.{kind}" for name in (*layers.values(), "conv_1d") for kind in kinds]
    names += [f"{name}_{kind}" for name in gates.values() for kind in kinds]
    read = Layer(parameters, prefix, **dtypes)
    read.expect([*names, "rg_lru.recurrent_param"])
    heads, size, _ = read.shape("rg_lru.input_gate_weight", 3)
    found = read.sizes(
        {
            "linear_x.weight": "inner features",
            "linear_y.weight": "inner features",
            "conv_1d.weight": "inner each width",
            "linear_out.weight": "features inner",
        }
    )
    features, inner, width = found["features"], found["inner"], found["width"]
    if inner != heads * size:
        needs = f"have shape (N, H, H) with N * H = {inner}, the features of conv_1d.weight"
        raise read.misshapen("rg_lru.input_gate_weight", needs)
    mixer = read.build(
        RGLRU,
        features,
        heads,
        head_dim=size,
        convolution_width=width,
        first_in_full=True,
    )
    arrays = [
        (mixer.convolution.taps, read.taps("conv_1d.weight", inner, width)),
        (mixer.convolution.bias, read("conv_1d.bias", inner)),
        (mixer.rate, read("rg_lru.recurrent_param", heads * size)),
    ]
    for ours, theirs in layers.items():
        sizes = (inner, features) if ours == "out" else (features, inner)
        arrays += read.with_bias(getattr(mixer, ours), theirs, *sizes)
    for ours, theirs in gates.items():
        arrays.append((getattr(mixer, f"{ours}_gate"), read(f"{theirs}_weight", heads, size, size)))
        arrays.append((getattr(mixer, f"{ours}_bias"), read(f"{theirs}_bias", heads, size)))
    return filled(mixer, arrays)
