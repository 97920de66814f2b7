"""The decoders of the package glassllm have its logits and its greedy text."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import nn
from experiments import decoder
from experiments.harness.errors import UserError

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "decoder_glassllm.npz"
CONFIG = {
    "vocab_size": 19,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "max_len": 32,
    "rope_base": 10000.0,
    "eps": 1e-6,
}
needs_package = pytest.mark.skipif(not decoder.is_installed(), reason=f"needs {decoder.INSTALL}")


def parameters(**changes):
    with np.load(GOLDEN) as arrays:
        start = "parameter/"
        found = {n.removeprefix(start): arrays[n] for n in arrays.files if n.startswith(start)}
    return {name: x for name, x in {**found, **changes}.items() if x is not None}


def continued(model, tokens, number):
    """The tokens after `tokens (1, T)`, greedily."""
    return nn.generate(model, jnp.asarray(tokens), max_new_tokens=number, temperature=0.0)[0]


def test_a_small_model_has_the_logits_and_the_greedy_tokens_of_glassllm():
    golden = np.load(GOLDEN)
    model = decoder.from_glassllm(parameters(), CONFIG)
    tokens = golden["tokens"][None]
    logits = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-4, atol=1e-4)
    found = continued(model, tokens, 12)
    np.testing.assert_array_equal(found[-12:], golden["continuation"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_f.gamma": None}, "missing: model.norm.weight"),
        ({"blocks.0.attn.bias": np.zeros(3)}, "unexpected: blocks.0.attn.bias"),
        ({"blocks.1.ffn.W2": np.zeros((3, 16))}, r"down_proj.weight must have shape \(16, 42\)"),
    ],
)
def test_entries_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        decoder.from_glassllm(parameters(**changes), CONFIG)


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(decoder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install glassllm==0.1.0"):
        decoder.load("en")


@needs_package
def test_the_pretrained_decoder_writes_the_text_of_glassllm():
    golden = np.load(GOLDEN)
    model, tokenizer = decoder.load("en")
    tokens = np.array([tokenizer.encode(str(golden["prompt"]))])
    logits = jax.jit(lambda model, tokens: model(tokens)[0, -1])(model, tokens)
    np.testing.assert_allclose(logits, golden["last_logits"], rtol=1e-4, atol=1e-4)
    found = continued(model, tokens, 40)
    assert tokenizer.decode(found[-40:].tolist()) == str(golden["text"])
