"""Whole decoders of transformers give the same logits, at once and token by token."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import nn
from tests.marks import slow

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
CONFIGURATIONS = json.loads((GOLDEN / "decoders.json").read_text())["configurations"]


def read(case):
    with np.load(GOLDEN / "decoders.npz") as arrays:
        given = {k.partition("/")[2]: x for k, x in arrays.items() if k.startswith(f"{case}/")}
    return given.pop("tokens"), given.pop("logits"), given


@pytest.mark.parametrize("case", ["llama", "mistral", slow("tied_yarn"), slow("qwen2"), "qwen3"])
def test_logits_agree(case):
    tokens, logits, parameters = read(case)
    model = nn.decoder_from_transformers(parameters, CONFIGURATIONS[case])
    np.testing.assert_allclose(jax.jit(model)(tokens), logits, rtol=1e-4, atol=1e-4)
    state = model.init_state(*tokens.shape)
    first, state = model.extend(tokens[:, :8], state)
    second, _ = model.extend(tokens[:, 8:], state)
    found = jnp.concatenate([first, second], 1)
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)


def test_names_of_older_versions():
    """Rotary options beside the others, a buffer, and a tied head that is stored again."""
    _, _, parameters = read("tied_yarn")
    rope = dict(CONFIGURATIONS["tied_yarn"]["rope_parameters"])
    older = {k: x for k, x in CONFIGURATIONS["tied_yarn"].items() if k != "rope_parameters"}
    older |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    rope["type"] = rope.pop("rope_type")
    more = {
        "lm_head.weight": parameters["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4),
    }
    model = nn.decoder_from_transformers({**parameters, **more}, older)
    new = nn.decoder_from_transformers(parameters, CONFIGURATIONS["tied_yarn"])
    assert model.config == new.config


@pytest.mark.parametrize(
    ("case", "changes", "windows"),
    [
        ("qwen2", {"sliding_window": 5}, [False, False]),
        ("qwen3", {"max_window_layers": 1}, [False, True]),
        ("qwen3", {"max_window_layers": 28}, [False, False]),
        ("mistral", {}, [True, True]),
        ("llama", {"sliding_window": 5}, [False, False]),
    ],
)
def test_windows_of_configurations_without_layer_types(case, changes, windows):
    given = {k: x for k, x in CONFIGURATIONS[case].items() if k != "layer_types"}
    if case == "qwen2":
        del given["use_sliding_window"]
    model = nn.decoder_from_transformers(read(case)[2], {**given, **changes})
    assert [m["name"] == "sliding_window" for m in model.config.mixer] == windows


def test_rotary_turns_of_yarn_have_separate_defaults():
    rope = {**CONFIGURATIONS["tied_yarn"]["rope_parameters"], "beta_fast": 16}
    rope.pop("beta_slow", None)
    changed = {**CONFIGURATIONS["tied_yarn"], "rope_parameters": rope}
    model = nn.decoder_from_transformers(read("tied_yarn")[2], changed)
    assert model.config.positions.turns == (1, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": False}}, "truncate"),
        ({"model_type": "gpt2"}, "model_type must be one of llama, .* got 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, .* got 0.5"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type must be default, .* 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type linear needs factor, a number"),
        ({"rope_parameters": "yarn"}, "rope_parameters or .* must be a mapping .* got 'yarn'"),
        ({"rope_scaling": "yarn"}, "rope_parameters or .* must be a mapping .* got 'yarn'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2}},
            "rope_parameters and rope_scaling must describe the same .*; leave one of them out",
        ),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a finite .* got 'x'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": None}},
            "rope factor must be a finite number above 0, got None",
        ),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be an int, 1 or more, got 2.5"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be an int, 1 or more, got None"),
        ({"head_dim": 0}, "head_dim must be an int, 1 or more or None, got 0"),
        ({"sliding_window": "a"}, "sliding_window must be an int, 1 or more or None, got 'a'"),
        ({"sliding_window": True}, "sliding_window must be an int, .* got True"),
        ({"layer_types": 3}, "layer_types must name one of .* 2 layers, got 3"),
        ({"layer_types": [[], "full_attention"]}, "layer_types must name one of .* got"),
        (
            {"model_type": "qwen3", "sliding_window": 5, "use_sliding_window": True}
            | {"max_window_layers": -1},
            "max_window_layers must be an int, 0 or more layers, got -1",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types must name one of .* 2 layers"),
        ({"num_hidden_layers": 3}, r"missing: model.layers.2.input_layernorm.weight, .* more"),
        ({"num_hidden_layers": 1}, r"unexpected: model.layers.1.input_layernorm.weight, "),
        ({"hidden_size": 12}, r"mlp.down_proj.bias must have shape \(12,\), got \(24,\)"),
    ],
)
def test_wrong_configurations_and_parameters_are_named(changes, message):
    _, _, parameters = read("llama")
    with pytest.raises(ValueError, match=message):
        nn.decoder_from_transformers(parameters, {**CONFIGURATIONS["llama"], **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda embed: {"lm_head.weight": 7 * embed}, "lm_head.weight must equal .* is True, got"),
        (lambda embed: {"lm_head.weight": embed[:3]}, r"lm_head.weight must have shape \(19, 24\)"),
        (lambda embed: {"lm_head.weight": "a"}, "lm_head.weight must be an array of .* got str"),
        (lambda embed: {"model.norm.weight": np.ones(24, bool)}, "model.norm.weight .* got bool"),
        (
            lambda embed: {"model.embed_tokens.weight": embed.astype(np.complex64)},
            "model.embed_tokens.weight must be .* got complex64; convert",
        ),
    ],
)
def test_wrong_arrays_of_tied_models_are_named(changes, message):
    _, _, parameters = read("tied_yarn")
    changed = {**parameters, **changes(parameters["model.embed_tokens.weight"])}
    with pytest.raises(ValueError, match=message):
        nn.decoder_from_transformers(changed, CONFIGURATIONS["tied_yarn"])


@pytest.mark.parametrize("parameters", [None, [1], {1: 2}])
def test_parameters_without_names_are_refused(parameters):
    with pytest.raises(ValueError, match="parameters must be a mapping of names .* got"):
        nn.decoder_from_transformers(parameters, CONFIGURATIONS["llama"])


def test_the_model_class_loads_it_too():
    _, _, parameters = read("llama")
    model = nn.TransformerLM.from_transformers(parameters, CONFIGURATIONS["llama"])
    other = nn.decoder_from_transformers(parameters, CONFIGURATIONS["llama"])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))


def test_a_configuration_without_sizes_is_named():
    with pytest.raises(ValueError, match="without vocab_size, hidden_size, intermediate_size"):
        nn.decoder_from_transformers({}, {"model_type": "llama"})


def test_the_epsilon_of_normalised_queries_is_fixed():
    _, _, parameters = read("qwen3")
    with pytest.raises(ValueError, match="have the epsilon 1e-6 here, got rms_norm_eps=1e-05"):
        changed = {**CONFIGURATIONS["qwen3"], "rms_norm_eps": 1e-5}
        nn.decoder_from_transformers(parameters, changed)
