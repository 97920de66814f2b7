"""Relative position biases: the buckets of T5, in calls and in decoding."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import CrossAttention, HybridHeads, RelativePositionBias, SelfAttention
from effattn.nn.relative_bias import relative_buckets
from tests.nn.build import filled, floats

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "decoders.json"
T, N = 40, 2


def made(is_causal=True):
    def build():
        sizes = {"num_buckets": 8, "max_distance": 20, "is_causal": is_causal}
        bias = RelativePositionBias(N, rngs=nnx.Rngs(0), **sizes)
        return SelfAttention(8, N, score_mod=bias, is_causal=is_causal, rngs=nnx.Rngs(0))

    return filled(build)


def test_buckets_are_those_of_transformers():
    for case in json.loads(GOLDEN.read_text())["buckets"]:
        found = relative_buckets(case["num_buckets"], case["max_distance"])
        right = case["buckets"]
        np.testing.assert_array_equal(found[: len(right)], right[: len(found)])
        assert set(right[len(found) :]) <= {found[-1]}


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_mixer_adds_the_bias_of_the_bucket(is_causal):
    mixer, x = made(is_causal), floats(1, T, 8)
    query, key, value = (layer(x)[0] for layer in (mixer.query, mixer.key, mixer.value))
    ahead = np.arange(T) - np.arange(T)[:, None]
    own = 8 if is_causal else 4
    bucket = relative_buckets(own, 20)[np.minimum(abs(ahead), 20)] + (ahead > 0) * (8 - own)
    logits = np.einsum("tnh,snh->nts", query, key) / 2
    logits += np.asarray(mixer.array_options["score_mod"].bias[...])[:, bucket]
    logits = np.where((ahead > 0) & is_causal, -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights, value)
    expected = np.einsum("tnh,nhd->td", out, mixer.out.kernel[...])
    np.testing.assert_allclose(jax.jit(mixer)(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_it_decodes_and_learns():
    mixer, x = made(), floats(1, T, 8)
    state = mixer.init_state(1, T)
    first, state = mixer.extend(x[:, :30], state)
    second, _ = mixer.extend(x[:, 30:], state)
    found = np.concatenate([first, second], 1)
    np.testing.assert_allclose(found, jax.jit(mixer)(x), rtol=1e-4, atol=1e-5)
    gradients = jax.jit(jax.grad(lambda mixer: (mixer(x) ** 2).sum()))(mixer)
    assert (np.asarray(gradients.array_options["score_mod"].bias[...]) != 0).all()


def test_a_bias_of_other_heads_is_refused():
    bias = RelativePositionBias(N + 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="score_mod must be for the 2 heads .*, got one for 3"):
        SelfAttention(8, N, score_mod=bias, rngs=nnx.Rngs(0))


def test_a_causal_bias_is_refused_in_bidirectional_attention():
    bias, rngs = RelativePositionBias(N, rngs=nnx.Rngs(0)), nnx.Rngs(0)
    heads = [{"name": "softmax", "num_heads": 1}] * N
    for build in (
        lambda: SelfAttention(8, N, score_mod=bias, is_causal=False, rngs=rngs),
        lambda: CrossAttention(8, N, score_mod=bias, rngs=rngs),
        lambda: HybridHeads(8, N, heads, score_mod=bias, is_causal=False, rngs=rngs),
    ):
        with pytest.raises(ValueError, match="with is_causal=True, .*; make it with is_causal=Fal"):
            build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_buckets": 7}, "num_buckets must be a multiple of 2 with is_causal=True, got 7"),
        ({"num_buckets": 6, "is_causal": False}, "must be a multiple of 4 with is_causal=False"),
        ({"max_distance": 16}, "max_distance must be an int, 17 or more tokens, got 16"),
        ({"is_causal": None}, "is_causal must be True or False"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RelativePositionBias(N, rngs=nnx.Rngs(0), **options)
