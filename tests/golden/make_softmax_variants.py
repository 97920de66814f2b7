"""Makes the golden file of variants of softmax attention with torch, on a CPU.

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers numpy
    /tmp/hf/bin/pip install --no-deps fla-core
    /tmp/hf/bin/python tests/golden/make_softmax_variants.py

`softmax_variants.npz` holds the causal attention of DeepSeek-V2 by transformers, of a small
configuration with random parameters, in two cases: "query_latent", whose queries come from a
latent, and "plain_query". Each case has the parameters under their names in transformers, the
tokens "x" `(2, 11, 24)`, the output, and the gradient of sum(output * cotangent) by x. Pairs of
rotary features are neighbours in transformers.

"stick_breaking" holds the naive form of flash-linear-attention: query, key and value
`(2, 11, 3, 4)`, and in the cases "past" and "current", which attends to the present token too, the
output and the gradients "d_<input>". All arrays are float32; nothing is downloaded.
"""

import importlib.metadata
import importlib.util
import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek

HERE = pathlib.Path(__file__).parent
BATCH, LENGTH, FEATURES = 2, 11, 24
SIZES = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
QUERY_RANK = {"query_latent": 10, "plain_query": None}


def latent(query_rank: int | None) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        hidden_size=FEATURES,
        num_hidden_layers=1,
        q_lora_rank=query_rank,
        attn_implementation="eager",
        **SIZES,
    )
    attention = deepseek.DeepseekV2Attention(config, layer_idx=0).eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.normal_(1.0, 0.3)
    x = torch.randn(BATCH, LENGTH, FEATURES, requires_grad=True)
    cotangent = torch.randn(BATCH, LENGTH, FEATURES)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    later = torch.triu(torch.full((LENGTH, LENGTH), -torch.inf), 1)[None, None]
    output, _ = attention(
        x,
        attention_mask=later,
        position_embeddings=deepseek.DeepseekV2RotaryEmbedding(config)(x, positions),
    )
    (gradient,) = torch.autograd.grad((output * cotangent).sum(), x)
    arrays = {"x": x, "cotangent": cotangent, "output": output, "gradient": gradient}
    return {**arrays, **dict(attention.named_parameters())}


def stick_breaking() -> dict[str, np.ndarray]:
    torch.manual_seed(1)
    # From its file, because the package around the file asks for Triton.
    (root,) = importlib.util.find_spec("fla").submodule_search_locations
    path = pathlib.Path(root, "ops", "stickbreaking_attn", "naive.py")
    spec = importlib.util.spec_from_file_location("naive_stick_breaking", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ("query", "key", "value")
    arrays = {name: torch.randn(BATCH, LENGTH, 3, 4) for name in (*names, "cotangent")}
    found = dict(arrays)
    for case in ("past", "current"):
        inputs = [arrays[name].clone().requires_grad_() for name in names]
        output, _ = module.naive_stickbreaking_attn(*inputs, attend_current=case == "current")
        gradients = torch.autograd.grad((output * arrays["cotangent"]).sum(), inputs)
        found[f"{case}/output"] = output
        found.update({f"{case}/d_{n}": x for n, x in zip(names, gradients, strict=True)})
    return found


def main() -> None:
    cases = {case: latent(rank) for case, rank in QUERY_RANK.items()}
    cases["stick_breaking"] = stick_breaking()
    arrays = {
        f"{case}/{name}": array.detach().numpy()
        for case, of_case in cases.items()
        for name, array in of_case.items()
    }
    np.savez_compressed(HERE / "softmax_variants.npz", **arrays)
    made_with = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fla-core": importlib.metadata.version("fla-core"),
    }
    (HERE / "softmax_variants.json").write_text(json.dumps(made_with, indent=2) + "\n")


if __name__ == "__main__":
    main()
