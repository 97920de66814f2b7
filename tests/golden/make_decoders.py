"""Makes the golden files of whole decoders and of rotary rules with transformers (torch, on a CPU).

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers numpy
    /tmp/hf/bin/python tests/golden/make_decoders.py

The models are small and have random parameters. `decoders.npz` holds, for each case, the parameters
under their names in transformers ("<case>/model..."), "<case>/tokens" and "<case>/logits", float32.
`decoders.json` holds the configuration of each case, the angles per position and the amplitude of
rotary rules, the buckets of T5 for the distances 0 to 299, and the versions. Nothing is downloaded.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention

HERE = pathlib.Path(__file__).parent
BATCH, LENGTH = 2, 13
SIZES = {
    "vocab_size": 19,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
# The trained length is short, so that the rules change the angles of these tokens.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}
CASES = {
    "llama": (
        transformers.LlamaConfig,
        {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    ),
    "tied_yarn": (
        transformers.LlamaConfig,
        {"rope_parameters": YARN, "tie_word_embeddings": True, "head_dim": 8},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 4, "rms_norm_eps": 1e-5}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (
        transformers.Qwen3Config,
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}
ROTARY = {
    "llama3": {**LLAMA3, "original_max_position_embeddings": 4096, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn_in_few_turns": YARN,
}


def make_case(name: str) -> tuple[dict[str, np.ndarray], dict]:
    kind, options = CASES[name]
    config = kind(**SIZES, **options)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and norms
            parameter.add_(0.1 * torch.randn_like(parameter))
        tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH))
        logits = model(tokens).logits
    arrays = {k: x.numpy() for k, x in model.state_dict().items()}
    if config.tie_word_embeddings:
        del arrays["lm_head.weight"]
    arrays |= {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy()}
    return {f"{name}/{k}": x for k, x in arrays.items()}, config.to_dict()


def rotary(rule: dict) -> dict:
    config = transformers.LlamaConfig(**SIZES, head_dim=32, rope_parameters=dict(rule))
    angles, amplitude = ROPE_INIT_FUNCTIONS[rule["rope_type"]](config, "cpu")
    return {"rule": rule, "angles": angles.tolist(), "amplitude": amplitude}


def buckets(num_buckets: int, max_distance: int) -> dict:
    distances = -torch.arange(300)
    found = T5Attention._relative_position_bucket(
        distances, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance
    )
    sizes = {"num_buckets": num_buckets, "max_distance": max_distance}
    return {**sizes, "buckets": found.tolist()}


def main() -> None:
    arrays, configurations = {}, {}
    for name in CASES:
        of_case, configurations[name] = make_case(name)
        arrays |= of_case
    np.savez_compressed(HERE / "decoders.npz", **arrays)
    made = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rotary": {name: rotary(rule) for name, rule in ROTARY.items()},
        "buckets": [buckets(32, 128), buckets(16, 128), buckets(8, 20), buckets(64, 300)],
        "configurations": configurations,
    }
    (HERE / "decoders.json").write_text(json.dumps(made, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
