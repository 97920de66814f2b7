"""Constructor options: signatures and checks of the classes follow the groups of options."""

import inspect

import jax.numpy as jnp
import pytest
from flax import nnx

from effattn.nn import (
    LSTM,
    AFTLocal,
    CrossAttention,
    FNet,
    LinformerSelfAttention,
    Mamba2,
    SelfAttention,
)
from effattn.nn.initializers import kernel_init

NEEDED = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("module", "defaults"),
    [
        (Mamba2, {"state_size": 64, "rngs": NEEDED, "is_causal": True, "chunk_size": None}),
        (AFTLocal, {"max_length": NEEDED, "kernel_init": kernel_init, "dtype": None}),
        (SelfAttention, {"attention": "softmax", "rotary": None, "param_dtype": jnp.float32}),
        (LinformerSelfAttention, {"is_causal": False, "num_kv_heads": None, "qk_norm": False}),
        (CrossAttention, {"context_features": None, "value_dim": None}),
    ],
)
def test_the_signature_has_the_options_of_the_group(module, defaults):
    parameters = inspect.signature(module).parameters
    assert list(parameters)[0] == "in_features"
    assert {name: parameters[name].default for name in defaults} == defaults
    assert list(inspect.signature(module.__init__).parameters)[1:] == list(parameters)


def test_options_of_other_groups_are_not_in_it():
    assert "num_kv_heads" not in inspect.signature(AFTLocal).parameters
    assert "is_causal" not in inspect.signature(CrossAttention).parameters
    assert "param_dtype" not in inspect.signature(FNet).parameters


def test_an_instance_has_the_signature_of_its_call():
    layer = SelfAttention(4, 2, rngs=nnx.Rngs(0))
    assert list(inspect.signature(layer).parameters) == ["x", "lengths", "segment_ids", "rngs"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"breadth": 3}, TypeError, "unexpected keyword argument 'breadth'"),
        ({"rngs": None}, ValueError, "rngs must be nnx.Rngs"),
        ({"is_causal": 1}, ValueError, "is_causal must be True or False, got 1"),
        ({"dtype": "int8"}, ValueError, "dtype must be a floating-point dtype"),
        ({"is_causal": False}, ValueError, "is_causal=False was given, but attention 'mamba2'"),
        ({"dropout_rate": 0.1}, ValueError, "dropout_rate=0.1 was given, but attention 'mamba2'"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        Mamba2(8, 2, **{"rngs": nnx.Rngs(0), **options})


def test_arguments_by_name_are_not_taken_by_position():
    with pytest.raises(
        TypeError, match=r"^LSTM\(\) takes in_features by position, got 2 arguments"
    ):
        LSTM(8, 2, rngs=nnx.Rngs(0))


def test_rngs_are_needed():
    with pytest.raises(TypeError, match="missing required keyword argument 'rngs'"):
        Mamba2(8, 2)
