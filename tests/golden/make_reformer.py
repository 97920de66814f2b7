"""Makes `reformer.npz` of this folder with Hugging Face's transformers (torch, on a CPU).

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers numpy
    /tmp/hf/bin/python tests/golden/make_reformer.py

Whole models of Reformer with random parameters, but zeros as the bias of the logits: a masked
language model with two layers of LSH attention, and a causal one with a local layer and a layer of
LSH attention whose chunk has all tokens. For each model the file holds the parameters under their
names in transformers, the tokens, the logits, the gradients of sum(logits * cotangent) by the token
embeddings and by a kernel of the first feed-forward layer, and the random rotations, which are the
same in all layers. Nothing is downloaded.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
BATCH, VOCABULARY, FEATURES, HEADS, BUCKETS, SEED = 2, 13, 16, 2, 8, 7
MODELS = {
    "masked": (transformers.ReformerForMaskedLM, 36, ["lsh", "lsh"], 6),
    "causal": (transformers.ReformerModelWithLMHead, 12, ["local", "lsh"], 12),
}


def make(name: str) -> dict[str, np.ndarray]:
    kind, length, layers, chunk_length = MODELS[name]
    torch.manual_seed(0)
    config = transformers.ReformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=FEATURES,
        num_attention_heads=HEADS,
        attention_head_size=FEATURES // HEADS,
        feed_forward_size=2 * FEATURES,
        chunk_size_feed_forward=4,
        axial_pos_embds=False,
        max_position_embeddings=length,
        attn_layers=layers,
        num_hashes=1,
        num_buckets=[BUCKETS],
        lsh_attn_chunk_length=chunk_length,
        local_attn_chunk_length=4,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        hash_seed=SEED,
        is_decoder=name == "causal",
    )
    model = kind(config).train()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if not parameter_name.startswith("lm_head") or parameter.ndim > 1:
                parameter.normal_(0.0, FEATURES**-0.5 if parameter.ndim > 1 else 0.3)
    tokens = torch.randint(VOCABULARY, (BATCH, length))
    logits = model(tokens).logits
    cotangent = torch.randn(logits.shape)
    (logits * cotangent).sum().backward()
    embeddings = model.reformer.embeddings.word_embeddings.weight
    hidden = model.reformer.encoder.layers[0].feed_forward.dense.dense.weight
    torch.manual_seed(SEED)
    rotations = torch.randn(HEADS, FEATURES // HEADS, 1, BUCKETS // 2)
    arrays = {
        "tokens": tokens.to(torch.int32),
        "logits": logits.detach(),
        "cotangent": cotangent,
        "gradient_of_embeddings": embeddings.grad,
        "gradient_of_hidden": hidden.grad,
        # (heads, head size, rounds, columns)
        "rotations": rotations,
        **{f"parameter/{key}": value for key, value in model.state_dict().items()},
    }
    return {f"{name}/{key}": array.numpy() for key, array in arrays.items()}


def main() -> None:
    np.savez_compressed(
        HERE / "reformer.npz", **{key: x for name in MODELS for key, x in make(name).items()}
    )
    made_with = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (HERE / "reformer.json").write_text(json.dumps(made_with, indent=2) + "\n")


if __name__ == "__main__":
    main()
