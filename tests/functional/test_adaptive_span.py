"""adaptive_span_attention and its layer: limits, gradients of spans, the penalty, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import AdaptiveSpanSelfAttention
from tests.nn.build import floats

SPAN = np.array([0.0, 3.5, 9.0, 40.0], np.float32)


def heads():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 23, n, 8)).astype(np.float32) for n in (4, 2, 2)]


def attend(*given, **options):
    options = {"span": SPAN, "max_span": 12, "ramp": 4.0, **options}
    return jax.jit(functools.partial(effattn.adaptive_span_attention, **options))(*given)


def test_long_spans_are_a_window():
    window = effattn.sliding_window_attention(
        *heads(), local_window_size=(11, 0), is_causal=True, implementation="xla"
    )
    np.testing.assert_allclose(attend(*heads(), span=SPAN + 12), window, rtol=1e-5, atol=1e-6)


def test_the_mask_multiplies_exponentials():
    query, key, value = heads()
    distance = np.arange(23)[:, None] - np.arange(23)
    mask = np.clip((4 + SPAN[:, None, None] - distance) / 4, 0, 1)
    mask = np.where((distance >= 0) & (distance < 12), mask, 0)
    logits = np.einsum("btnh,bsnh->bnts", query, key.repeat(2, 2)) / 8**0.5
    weights = mask * np.exp(logits)
    weights = weights / weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnh->btnh", weights, value.repeat(2, 2))
    np.testing.assert_allclose(attend(query, key, value), expected, rtol=1e-5, atol=1e-6)


def test_a_loss_and_the_penalty_move_the_spans():
    """The target is the value of 4 tokens before, so that spans grow; the penalty shrinks them."""
    mixer = AdaptiveSpanSelfAttention(8, 2, max_span=16, ramp=4.0, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(mixer.spans(), [2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(mixer.penalty(), 2.0, rtol=1e-6)
    x = floats(2, 23, 8)

    @functools.partial(jax.jit, static_argnums=2)
    def gradient(mixer, x, weight):
        def loss(mixer):
            far = jnp.roll(mixer.value(x), 4, 1)
            heads = (mixer.query(x), mixer.key(x), mixer.value(x))
            out = effattn.adaptive_span_attention(*heads, span=mixer.spans(), max_span=16, ramp=4.0)
            return jnp.mean((out - far)[:, 4:] ** 2) + weight * mixer.penalty()

        return jax.grad(loss)(mixer).span_logits[...]

    assert (gradient(mixer, x, 0.0) < 0).all()
    assert (gradient(mixer, x, 10.0) > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": -SPAN}, "span must be 0 or more, got -40"),
        ({"span": np.nan * SPAN}, "span must be 0 or more, got nan"),
        ({"span": SPAN[:2]}, r"span must be floating point of shape \(4,\)"),
        ({"max_span": 0}, "max_span must be an int, 1 or more tokens, the own token included"),
        ({"ramp": 0}, "ramp must be a finite number above 0, got 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        effattn.adaptive_span_attention(
            *heads(), **{"span": SPAN, "max_span": 12, "ramp": 4.0, **options}
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": SPAN}, "AdaptiveSpanSelfAttention has no option span; it learns the spans"),
        (
            {"initial_span": 16},
            "initial_span must be a number above 0 and below max_span=16, or None",
        ),
    ],
)
def test_wrong_options_of_the_layer_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveSpanSelfAttention(8, 4, max_span=16, rngs=nnx.Rngs(0), **options)
