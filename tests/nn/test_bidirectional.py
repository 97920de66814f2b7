"""Bidirectional mixing: documents and padding with each kind of mixer, and wrong options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import Bidirectional, TransformerConfig, TransformerLM
from tests.nn.build import filled, floats
from tests.nn.calls import call

T, D = 11, 8
MIXERS = {
    "mamba": {"name": "mamba", "state_size": 3},
    "s4": {"name": "s4", "state_size": 4, "max_length": T},
}


def made(mixer, **options):
    return filled(lambda: Bidirectional(D, 2, mixer=mixer, rngs=nnx.Rngs(0), **options))


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_padded_rows_give_what_they_give_alone(mixer):
    layer, x, lengths = made(mixer), floats(2, T, D), np.array([T, 4])
    padded = np.where(np.arange(T)[:, None] < lengths[:, None, None], x, np.nan)
    y = call(layer, padded, lengths)
    np.testing.assert_allclose(y[0], call(layer, x)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[1, :4], call(layer, x[:, :4])[1], rtol=1e-5, atol=1e-5)


def test_each_document_is_reversed_in_its_place():
    layer, x = made(MIXERS["mamba"]), floats(1, T, D)
    ids = np.repeat([2, 0, 1], [4, 2, 5])[None]
    y = call(layer, np.where(ids[..., None] == 0, np.nan, x), np.array([10]), ids)
    np.testing.assert_allclose(y[:, :4], call(layer, x[:, :4]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[:, 6:10], call(layer, x[:, 6:10]), rtol=1e-5, atol=1e-5)


def test_every_token_reads_every_other():
    layer, x = made(MIXERS["mamba"]), floats(1, T, D)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x)[0].sum(-1)))(x)[:, 0].sum(-1)
    assert (np.asarray(jacobian) != 0).all()


def test_a_masked_model_has_it_by_name():
    config = TransformerConfig(
        vocab_size=5, num_layers=1, features=D, num_heads=2, mixer="bidirectional", is_causal=False
    )
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    assert model(jnp.zeros((1, 6), int)).shape == (1, 6, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "mambo"}, "unknown mechanism 'mambo'"),
        (
            {"mixer": "mamba", "max_length": -1},
            "max_length must be an int, 1 or more tokens, or None, got -1",
        ),
        (
            {"mixer": "mamba", "max_length": "a"},
            "max_length must be an int, 1 or more tokens, or None, got 'a'",
        ),
        ({"mixer": None}, "mixer must be a registered name"),
        ({"mixer": "fnet"}, "'fnet' .*is_causal=True|lacks .*causal"),
        ({"mixer": "mamba", "is_causal": True}, "as one of its two mixers reads .* from the end"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
