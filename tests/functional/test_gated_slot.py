"""Gated slot attention: slots as a memory of tokens, and its layer."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import GatedSlotState, gated_slot_attention
from effattn.nn import GatedSlotAttention
from tests.nn.build import filled

BATCH, LENGTH, HEADS, SIZE = 2, 9, 2, 4
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = RNG.normal(size=(3, BATCH, LENGTH, HEADS, SIZE)).astype(np.float32)
STATE = np.zeros((BATCH, HEADS, SIZE, 5), np.float32)


def test_a_slot_for_each_token_is_exact_attention():
    """Token t replaces the content of slot t; the last query then sees every token once."""
    replaced = np.where(np.eye(LENGTH, dtype=bool), -np.inf, 0).astype(np.float32)
    log_decay = np.broadcast_to(replaced[:, None], (BATCH, LENGTH, HEADS, LENGTH))
    run = jax.jit(functools.partial(gated_slot_attention, return_state=True, chunk_size=4))
    out, state = run(QUERY, KEY, VALUE, log_decay=log_decay)
    exact = effattn.dot_product_attention(QUERY, KEY, VALUE, is_causal=True)
    np.testing.assert_allclose(out[:, -1], exact[:, -1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.keys, np.moveaxis(KEY, 1, 3), rtol=1e-6)
    np.testing.assert_allclose(state.values, np.moveaxis(VALUE, 1, 2), rtol=1e-6)


def by_hand(mixer, x):
    def of(variable):
        return np.asarray(variable[...], np.float64)

    def silu(x):
        return x / (1 + np.exp(-x))

    query, key, value, logits = (
        np.einsum("td,dnh->tnh", x, of(layer.kernel))
        for layer in (mixer.query, mixer.key, mixer.value, mixer.decay)
    )
    query, key, value = silu(query), silu(key), silu(value)
    alpha = (1 / (1 + np.exp(-logits))) ** (1 / 8)
    out = np.zeros_like(value)
    for n in range(HEADS):
        keys, values = np.zeros((2, mixer.num_slots, SIZE))
        for t in range(LENGTH):
            a = alpha[t, n][:, None]
            keys, values = a * keys + (1 - a) * key[t, n], a * values + (1 - a) * value[t, n]
            weights = np.exp(keys @ query[t, n])
            out[t, n] = weights @ values / weights.sum()
    out = silu(out.reshape(LENGTH, -1))
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5) * of(mixer.norm.scale)
    return out @ of(mixer.out.kernel).reshape(out.shape[1], -1)


def test_the_layer_is_that_of_the_paper():
    x = RNG.normal(size=(LENGTH, 8)).astype(np.float32)
    make = functools.partial(GatedSlotAttention, 8, HEADS, num_slots=3)
    mixer = filled(lambda: make(rngs=nnx.Rngs(0)), seed=1, spread=1 / 2)
    y = jax.jit(lambda mixer, x: mixer(x))(mixer, x[None])[0]
    np.testing.assert_allclose(y, by_hand(mixer, x.astype(np.float64)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_decay": np.zeros((2, 9, 5))}, r"log_decay must .*\(2, 9, 2, 5\)"),
        ({"log_decay": np.ones((2, 9, 2, 5))}, "log_decay must be 0 or less"),
        ({"log_decay": np.zeros((2, 9, 2, 0))}, "at least one slot, .* got"),
        ({"initial_state": STATE}, "must be the GatedSlotState .* got "),
        (
            {"initial_state": GatedSlotState(STATE, STATE)},
            r"initial_state.values must .*\(2, 2, 5, 4\)",
        ),
        ({"implementation": "llvm"}, "value_log_decay"),
    ],
)
def test_bad_arguments_are_named(options, message):
    options = {"log_decay": np.zeros((2, 9, 2, 5), np.float32), **options}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        gated_slot_attention(QUERY, KEY, VALUE, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots must be an int, 1 or more slots, got 0"),
        ({"temperature": 0}, "temperature must be .* got 0"),
        ({"log_decay": STATE}, "GatedSlotAttention has no option log_decay; it computes"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        GatedSlotAttention(8, HEADS, **options, rngs=nnx.Rngs(0))
