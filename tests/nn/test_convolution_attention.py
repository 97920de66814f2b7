"""ConvolutionAttention: the sum of attention and a convolution, and wrong options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import ConvolutionAttention, TransformerConfig, TransformerLM, generate
from tests.nn.build import filled, floats
from tests.nn.calls import call

T, D = 9, 8


def make(**options):
    options = {"combination": "sum", "width": 3, **options}
    return ConvolutionAttention(D, 2, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_sum_with_taps_of_one_token_adds_the_projected_values(is_causal):
    """A tap of one at the token itself, and zeros elsewhere, leave the values as they are."""
    mixer = filled(lambda: make(is_causal=is_causal, num_kv_heads=1))
    mixer.convolution.taps[...] = jnp.zeros((3, 4)).at[2 if is_causal else 1].set(1)
    x = floats(2, T, D)
    added = x @ mixer.attention.value.kernel[...].reshape(D, 4) @ mixer.out.kernel[...]
    expected = np.asarray(mixer.attention(x)) + added
    np.testing.assert_allclose(call(mixer, x), expected, rtol=1e-5, atol=1e-5)


def test_it_reads_later_tokens_only_if_bidirectional():
    """Within the window of the convolution, with attention that looks back no further."""
    for is_causal, seen in ((True, (3, 4)), (False, (3, 4, 5))):
        window = {"name": "sliding_window", "local_window_size": (1, 0 if is_causal else 1)}
        mixer = filled(lambda w=window, c=is_causal: make(attention=w, is_causal=c, width=2 + c))
        gradient = jax.jit(jax.grad(lambda x, m=mixer: jnp.abs(m(x)[:, 4]).sum()))
        read = np.abs(gradient(floats(1, T, D)))[0].sum(-1) > 0
        expected = np.isin(np.arange(T), (2, *seen) if is_causal else seen)
        np.testing.assert_array_equal(read, expected)


def test_a_model_of_sums_decodes_as_it_is_called():
    mixer = {"name": "convolution_attention", "combination": "sum", "width": 3}
    config = TransformerConfig(13, 1, D, 2, mixer=mixer, parallel=True)
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)), spread=0.2)
    prompt = np.random.default_rng(0).integers(0, 13, (2, 4)).astype(np.int32)
    found = generate(model, prompt, max_new_tokens=4, temperature=0.0)
    logits = call(model, np.concatenate([prompt, found], 1))
    np.testing.assert_array_equal(found, np.argmax(logits[:, 3:-1], -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"combination": "both"}, "combination must be 'halves' or 'sum', got 'both'"),
        (
            {"attention": "mamba"},
            "an attention mixer that projects tokens to values, got .*mam",
        ),
        (
            {"attention": {"name": "latent", "kv_rank": D, "rotary_dim": 2}},
            "projects tokens to values, got attention='latent', whose LatentAttention does",
        ),
        (
            {"attention": "inducing_points", "is_causal": False},
            "projects tokens to values, got attention='inducing_points', whose InducedSelf",
        ),
        ({"max_length": 0}, "max_length must be an int, 1 or more tokens, or None, got 0"),
        ({"attention": "mamba", "is_causal": False}, "'mamba' lacks 'bidirectional'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_bidirectional_one_does_not_decode():
    with pytest.raises(ValueError, match="bidirectional ConvolutionAttention cannot decode"):
        make(is_causal=False).init_state(2, 4)
