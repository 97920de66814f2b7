"""Mixers outside the registry: classes, functions that make a mixer, and attention functions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Mamba2,
    MixtureOfMechanisms,
    SelfAttention,
    TransformerConfig,
    TransformerLM,
)

CONFIG = TransformerConfig(
    vocab_size=11, num_layers=1, features=8, num_heads=2, positions="none", param_dtype="float32"
)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6)).astype(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanState:
    total: jax.Array
    length: jax.Array


class PrefixMean(nnx.Module):
    """A mixer of another package: the projected mean of the tokens so far."""

    def __init__(self, in_features: int, *, gain: float = 1.0, dtype=None, rngs: nnx.Rngs):
        self.gain = gain
        self.project = nnx.Linear(in_features, in_features, dtype=dtype, rngs=rngs)

    def __call__(self, x, *, lengths=None, segment_ids=None, rngs=None):
        return self.extend(x, self.init_state(len(x), 0))[0]

    def init_state(self, batch, max_length, dtype=None):
        features = self.project.in_features
        return MeanState(jnp.zeros((batch, features)), jnp.zeros((batch,), jnp.int32))

    def extend(self, x, state, *, lengths=None):
        sums = state.total[:, None] + jnp.cumsum(x, 1)
        count = state.length[:, None] + jnp.arange(1, x.shape[1] + 1)
        y = self.gain * self.project(sums / count[..., None])
        return y, MeanState(sums[:, -1], state.length + x.shape[1])


def prefix_mean(in_features, num_heads, is_causal, rngs):
    assert num_heads == CONFIG.num_heads and is_causal
    return PrefixMean(in_features, rngs=rngs)


def uniform(query, key, value, *, is_causal=False):
    """Attention with equal weights for all tokens."""
    assert is_causal
    count = jnp.arange(1, value.shape[1] + 1, dtype=value.dtype)
    return jnp.cumsum(value, 1) / count[:, None, None]


def model(mixer, **changes):
    return TransformerLM(dataclasses.replace(CONFIG, mixer=mixer, **changes), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "mixer",
    [
        PrefixMean,
        {"name": PrefixMean, "gain": 2.0},
        functools.partial(PrefixMean, gain=2.0),
        prefix_mean,
        effattn.linear_attention,
    ],
)
def test_models_decode_with_mixers_that_decode(mixer):
    lm = model(mixer, num_layers=2)
    whole = lm(TOKENS)
    first, state = lm.extend(TOKENS[:, :4], lm.init_state(2, 6))
    second, state = lm.extend(TOKENS[:, 4:5], state)
    third, _ = lm.step(TOKENS[:, 5:], state)
    np.testing.assert_allclose(jnp.concatenate([first, second, third], 1), whole, atol=1e-5)


def test_options_reach_the_mixer():
    kept = model(PrefixMean, dtype="bfloat16").blocks[0].mixer
    assert kept.gain == 1.0 and kept.project.dtype == jnp.bfloat16
    assert model({"name": PrefixMean, "gain": 2.0}).blocks[0].mixer.gain == 2.0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (effattn.linear_attention, "linear"),
        (functools.partial(effattn.dot_product_attention, logits_soft_cap=3.0), "softmax"),
        (Mamba2, "mamba2"),
    ],
)
def test_registered_mechanisms_may_be_given_as_functions_and_classes(given, name):
    options = dict(getattr(given, "keywords", {}))
    expected = model({"name": name, **options})(TOKENS)
    np.testing.assert_array_equal(model(given)(TOKENS), expected)


def test_attention_functions_are_called_by_self_attention():
    lm = model(uniform)
    assert isinstance(lm.blocks[0].mixer, SelfAttention)
    assert np.isfinite(lm(TOKENS)).all()
    with pytest.raises(
        NotImplementedError, match="attention 'uniform' cannot decode, as it is not"
    ):
        lm.init_state(2, 6)


def test_parts_of_other_mixers_may_be_unregistered():
    groups = {"heads": [{"name": uniform, "num_heads": 1}, {"name": "softmax", "num_heads": 1}]}
    assert np.isfinite(model(groups)(TOKENS)).all()
    mixture = MixtureOfMechanisms(8, 2, mechanisms=(PrefixMean, "softmax"), rngs=nnx.Rngs(0))
    assert mixture.names == ("PrefixMean", "softmax")
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    y, _ = mixture.extend(x, mixture.init_state(2, 5))
    np.testing.assert_allclose(y, mixture(x), atol=1e-5)


def test_cross_attention_takes_functions():
    encoder = dataclasses.replace(CONFIG, is_causal=False)
    given = effattn.dot_product_attention
    by_name, by_function = (
        EncoderDecoder(EncoderDecoderConfig(encoder, CONFIG, cross), rngs=nnx.Rngs(0))
        for cross in ("softmax", given)
    )
    expected = by_name(TOKENS, TOKENS)
    np.testing.assert_array_equal(by_function(TOKENS, TOKENS), expected)


def test_configurations_with_callables_compare():
    assert dataclasses.replace(CONFIG, mixer=PrefixMean) == dataclasses.replace(
        CONFIG, mixer=PrefixMean
    )
    assert dataclasses.replace(CONFIG, mixer=PrefixMean) != dataclasses.replace(
        CONFIG, mixer=prefix_mean
    )


def without_decoding(in_features, rngs):
    return nnx.Linear(in_features, in_features, rngs=rngs)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: model(3), ValueError, "mixer must be a registered name, a mixer class, .* got 3"),
        (lambda: model({"gain": 2.0}), ValueError, 'as "name" and options, got {'),
        (lambda: model("prefix"), ValueError, "unknown mechanism 'prefix'; registered are"),
        (
            lambda: model({"name": PrefixMean, "gian": 2.0}),
            ValueError,
            "the mixer 'PrefixMean' has no option gian; its options are dtype, gain",
        ),
        (
            lambda: model(PrefixMean, num_kv_heads=1),
            ValueError,
            "'PrefixMean' has no argument num_kv_heads, got num_kv_heads=1 in the model; leave",
        ),
        (
            lambda: model(PrefixMean, positions="alibi"),
            ValueError,
            "needs the capability 'score_mod', which 'PrefixMean' lacks",
        ),
        (
            lambda: model({"name": uniform, "scale": 2.0}),
            ValueError,
            "attention 'uniform' has no option scale",
        ),
        (
            lambda: model({"name": "path", "width": 3}),
            ValueError,
            r"'path' has no option width; its options are chunk_size, convolution_width,(?!.*beta)",
        ),
        (
            lambda: model(without_decoding).init_state(2, 6),
            NotImplementedError,
            "Linear has no init_state and extend, so the model cannot decode",
        ),
    ],
)
def test_wrong_mixers_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
