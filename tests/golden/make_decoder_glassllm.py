"""Makes `decoder_glassllm.npz` with the package glassllm (NumPy).

    pip install glassllm==0.1.0
    python tests/golden/make_decoder_glassllm.py

The file holds a small model with random parameters ("parameter/<name>"), its tokens, the logits and
the tokens that it continues them with, greedily. For the pretrained English model it holds the
prompt, the greedy text and the logits of the prompt's last token. Nothing is downloaded.
"""

import pathlib

import glassllm
import numpy as np

HERE = pathlib.Path(__file__).parent
PROMPT = "Alice was beginning to"
SIZES = {"vocab_size": 19, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}


def greedy(model: glassllm.GlassLM, tokens: list[int], number: int) -> list[int]:
    return [step.token for step in model.generate(tokens, number, greedy=True)]


def small() -> dict[str, np.ndarray]:
    model = glassllm.GlassLM(glassllm.Config(max_len=32, init_std=0.4, **SIZES))
    rng = np.random.default_rng(0)
    parameters = model.named_parameters()
    for name, parameter in parameters.items():
        if name.endswith("gamma"):
            parameter.data = rng.uniform(0.5, 1.5, parameter.data.shape).astype(np.float32)
    tokens = rng.integers(0, 19, 9)
    return {
        **{f"parameter/{name}": parameter.data for name, parameter in parameters.items()},
        "tokens": tokens,
        "logits": model(tokens).data,
        "continuation": np.array(greedy(model, tokens.tolist(), 12)),
    }


def english() -> dict[str, np.ndarray]:
    model, tokenizer = glassllm.load_pretrained("en")
    tokens = tokenizer.encode(PROMPT)
    return {
        "prompt": np.array(PROMPT),
        "text": np.array(tokenizer.decode(greedy(model, tokens, 40))),
        "last_logits": model(tokens).data[0, -1],
    }


if __name__ == "__main__":
    np.savez_compressed(HERE / "decoder_glassllm.npz", **small(), **english())
