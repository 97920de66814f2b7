"""Pretrained decoder in JAX: the language models of the package glassllm, as a `TransformerLM`.

A model of glassllm is a decoder of the Llama kind with 0.9 million parameters, written in NumPy;
the package contains one for English ("en") and one for Portuguese ("pt").
"""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from effattn.nn import TransformerLM, decoder_from_transformers
from experiments.harness.errors import UserError

PACKAGE = "glassllm"
INSTALL = "pip install glassllm==0.1.0"

# Layers within a block: names of glassllm, and of the Llama models of transformers.
_LAYERS = {
    "norm1.gamma": "input_layernorm",
    "norm2.gamma": "post_attention_layernorm",
    "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj",
    "attn.W_V": "self_attn.v_proj",
    "attn.W_O": "self_attn.o_proj",
    "ffn.W1": "mlp.gate_proj",
    "ffn.W3": "mlp.up_proj",
    "ffn.W2": "mlp.down_proj",
}


def is_installed() -> bool:
    """Returns whether the package of the pretrained decoders is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def load(language: str) -> tuple[TransformerLM, Any]:
    """Returns the pretrained decoder of a language, and its tokenizer.

    Raises:
      UserError: the package is not installed.
    """
    if not is_installed():
        raise UserError(f"the pretrained decoder is not installed: {INSTALL}")
    model, tokenizer = importlib.import_module(PACKAGE).load_pretrained(language)
    parameters = {name: array.data for name, array in model.named_parameters().items()}
    return from_glassllm(parameters, vars(model.cfg)), tokenizer


def from_glassllm(parameters: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> TransformerLM:
    """The model with the parameters of a `GlassLM`.

    Args:
      parameters: arrays by their names in `named_parameters()`.
      config: the fields of its `Config`.

    Raises:
      ValueError: a name that is missing or unexpected, or an array of another shape.
    """
    turned = {"attn.W_Q": config["n_heads"], "attn.W_K": config["n_kv_heads"]}
    arrays = {}
    for name, array in parameters.items():
        _, _, rest = name.split(".", 2) if name.startswith("blocks.") else ("", "", name)
        if rest in turned:
            array = _halves(array, turned[rest])
        arrays[_name(name)] = array if rest == "E" else array.T
    hidden = parameters["blocks.0.ffn.W1"].shape[1] if "blocks.0.ffn.W1" in parameters else 1
    given = {
        "model_type": "llama",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": hidden,
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config["n_kv_heads"],
        "max_position_embeddings": config["max_len"],
        "rope_theta": config["rope_base"],
        "rms_norm_eps": config["eps"],
        "tie_word_embeddings": True,
    }
    return decoder_from_transformers(arrays, given)


def _name(name: str) -> str:
    """The name of an array of glassllm in a Llama model; other names stay as they are."""
    whole = {"E": "model.embed_tokens.weight", "norm_f.gamma": "model.norm.weight"}
    if not name.startswith("blocks."):
        return whole.get(name, name)
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_LAYERS[rest]}.weight" if rest in _LAYERS else name


def _halves(kernel: np.ndarray, heads: int) -> np.ndarray:
    """A kernel `(D, heads H)` whose rotary pairs (0, 1), (2, 3), ... of a head are two halves."""
    of_heads = kernel.reshape(len(kernel), heads, -1)
    halves = np.concatenate([of_heads[..., ::2], of_heads[..., 1::2]], -1)
    return halves.reshape(kernel.shape)
