"""Makes `layers.npz` with Hugging Face's transformers (torch, on a CPU).

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers numpy
    /tmp/hf/bin/python tests/golden/make_layers.py

The layers are small and have random parameters. The file holds, for each case, the parameters under
their names in transformers ("<case>/parameter/<name>"), the tokens "<case>/x" and the output
"<case>/output", float32. Nothing is downloaded.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as recurrent_gemma
from transformers.models.reformer import modeling_reformer as reformer

HERE = pathlib.Path(__file__).parent
BATCH, LENGTH, FEATURES = 2, 12, 16


def randomise(module: torch.nn.Module) -> None:
    """Draws larger parameters than a model starts with, so that attention varies."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, FEATURES**-0.5 if parameter.ndim > 1 else 0.3)


def case(module: torch.nn.Module, call) -> dict[str, np.ndarray]:
    """Parameters, tokens and output of a layer."""
    randomise(module.eval())
    x = torch.randn(BATCH, LENGTH, FEATURES)
    with torch.no_grad():
        output = call(module, x)
    state = {f"parameter/{name}": array.numpy() for name, array in module.state_dict().items()}
    return {**state, "x": x.numpy(), "output": output.numpy()}


def causal_mask() -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), -1e9).triu(1)[None, None]


def make_deepseek(query_rank: int | None) -> dict[str, np.ndarray]:
    config = transformers.DeepseekV2Config(
        hidden_size=FEATURES,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=query_rank,
        kv_lora_rank=6,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        max_position_embeddings=64,
    )
    config._attn_implementation = "eager"
    rotary = deepseek.DeepseekV2RotaryEmbedding(config)

    def call(layer, x):
        positions = torch.arange(LENGTH)[None].expand(BATCH, -1)
        return layer(x, causal_mask(), position_embeddings=rotary(x, positions))[0]

    return case(deepseek.DeepseekV2Attention(config, layer_idx=0), call)


def make_qwen3_next() -> dict[str, np.ndarray]:
    config = transformers.Qwen3NextConfig(
        hidden_size=FEATURES,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=5,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=3,
    )
    layer = qwen3_next.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    return case(layer, lambda layer, x: layer(x))


def make_recurrent_gemma() -> dict[str, np.ndarray]:
    config = transformers.RecurrentGemmaConfig(
        hidden_size=FEATURES, lru_width=12, num_attention_heads=3, conv1d_width=3
    )
    layer = recurrent_gemma.RecurrentGemmaRecurrentBlock(config, layer_idx=0)

    def call(layer, x):
        positions = torch.arange(LENGTH)[None].expand(BATCH, -1)
        return layer(x, positions, None, use_cache=False)[0]

    return case(layer, call)


def make_reformer() -> dict[str, np.ndarray]:
    """The update of a local layer, without the norm before it."""
    config = transformers.ReformerConfig(
        hidden_size=FEATURES,
        num_attention_heads=2,
        attention_head_size=6,
        attn_layers=["local"],
        local_attn_chunk_length=3,
        local_num_chunks_before=1,
        local_num_chunks_after=0,
        is_decoder=True,
    )
    layer = reformer.ReformerAttention(config, layer_id=0)
    return case(layer, lambda layer, x: layer.output(layer.self_attention(x).hidden_states))


def main() -> None:
    cases = {
        "deepseek_v2": lambda: make_deepseek(None),
        "deepseek_v2_query_rank": lambda: make_deepseek(8),
        "qwen3_next": make_qwen3_next,
        "recurrent_gemma": make_recurrent_gemma,
        "reformer_local": make_reformer,
    }
    arrays = {}
    for seed, (name, make) in enumerate(cases.items()):
        torch.manual_seed(seed)
        arrays.update({f"{name}/{key}": array for key, array in make().items()})
    np.savez_compressed(HERE / "layers.npz", **arrays)
    made_with = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (HERE / "layers.json").write_text(json.dumps(made_with, indent=2) + "\n")


if __name__ == "__main__":
    main()
