"""Makes the golden file of Mega with the last releases of transformers that have it, on a CPU.

    python3.11 -m venv /tmp/mega && /tmp/mega/bin/pip install torch numpy "transformers==4.40.2"
    /tmp/mega/bin/python tests/golden/make_mega.py

`mega.npz` holds, for each case of `CASES`, the parameters under their names in transformers
("<case>/<name>"), the tokens "<case>/x" `(B, T, D)`, "<case>/output" and "<case>/d_x", the gradient
of sum(output * cotangent) by x, with "<case>/cotangent". The layer has no norm. In the case
"padded", "padded/lengths" are the valid tokens of each row; outputs and cotangent of the others are
zero. All arrays are float32 but the lengths; nothing is downloaded.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.models.mega.modeling_mega import MegaMovingAverageGatedAttention

HERE = pathlib.Path(__file__).parent
BATCH, LENGTH, CHUNK = 2, 12, 4
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 6,
    "ema_projection_size": 3,
    "shared_representation_size": 4,
}
CASES = {
    "both_ways": {
        "chunk_size": CHUNK,
        "max_positions": CHUNK,
        "relative_positional_bias": "simple",
    },
    "causal": {"chunk_size": CHUNK, "bidirectional": False},
    "causal_laplace": {
        "chunk_size": CHUNK,
        "max_positions": CHUNK,
        "bidirectional": False,
        "attention_activation": "laplace",
        "relative_positional_bias": "simple",
    },
    "padded": {"attention_activation": "laplace", "max_positions": LENGTH},
}


def make(name: str) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    options = CASES[name]
    config = transformers.MegaConfig(
        **SIZES,
        **options,
        use_chunking="chunk_size" in options,
        normalize_before_mega=False,
    )
    layer = MegaMovingAverageGatedAttention(config)
    layer.norm = torch.nn.Identity()
    layer.eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.7)
    x = torch.randn(BATCH, LENGTH, config.hidden_size, requires_grad=True)
    cotangent = torch.randn(BATCH, LENGTH, config.hidden_size)
    lengths, masks = torch.tensor([LENGTH - 3, LENGTH]), {}
    if name == "padded":
        valid = torch.arange(LENGTH) < lengths[:, None]
        masks["padding_mask"] = valid.float()
        cotangent = cotangent * valid[..., None]
    if not config.bidirectional:
        masks["causal_mask"] = torch.ones(CHUNK, CHUNK).tril()
    output = layer(x.transpose(0, 1), **masks)[0].transpose(0, 1)
    if name == "padded":
        output = output * valid[..., None]
    (output * cotangent).sum().backward()
    arrays = {key: parameter.detach() for key, parameter in layer.named_parameters()}
    arrays |= {"x": x.detach(), "output": output.detach(), "d_x": x.grad, "cotangent": cotangent}
    if name == "padded":
        arrays["lengths"] = lengths
    return {f"{name}/{key}": array.numpy() for key, array in arrays.items()}


if __name__ == "__main__":
    np.savez_compressed(
        HERE / "mega.npz", **{k: x for name in CASES for k, x in make(name).items()}
    )
    made_with = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (HERE / "mega.json").write_text(json.dumps(made_with, indent=2) + "\n")
