"""Stick-breaking attention beyond the laws: the paper's sums, an independent form, memory."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.analysis import cost

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "softmax_variants.npz"


@pytest.mark.parametrize("attend_current", [False, True])
def test_it_agrees_with_flash_linear_attention(attend_current):
    case = f"stick_breaking/{'current' if attend_current else 'past'}"
    with np.load(GOLDEN) as arrays:
        inputs = [arrays[f"stick_breaking/{name}"] for name in ("query", "key", "value")]
        cotangent = arrays["stick_breaking/cotangent"]
        expected = {k.removeprefix(f"{case}/"): arrays[k] for k in arrays.files if case in k}

    @jax.jit
    def run(inputs, cotangent):
        attend = functools.partial(
            effattn.stick_breaking_attention, attend_current=attend_current, query_tile=4
        )
        out, pull_back = jax.vjp(lambda x: attend(*x), inputs)
        return out, pull_back(cotangent)[0]

    out, gradients = run(inputs, cotangent)
    np.testing.assert_allclose(out, expected["output"], atol=1e-5)
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        np.testing.assert_allclose(gradient, expected[f"d_{name}"], atol=1e-4)


def weights(query, key, **options):
    """Weights `(T, S)` of one head, read off by one-hot values."""
    values = np.eye(len(key), dtype=np.float32)
    attend = jax.jit(functools.partial(effattn.stick_breaking_attention, **options))
    return np.asarray(attend(query[:, None], key[:, None], values[:, None]))[:, 0]


def test_equal_logits_halve_what_is_left():
    """With logits of zero each key takes one half, and the rest goes to no key."""
    x = np.zeros((5, 4), np.float32)
    found = weights(x, x)
    expected = [[2.0 ** -(i - j) if j < i else 0 for j in range(5)] for i in range(5)]
    np.testing.assert_allclose(found, expected)
    with_current = weights(x, x, attend_current=True)
    np.testing.assert_allclose(with_current[:, 0], [2.0 ** -(i + 1) for i in range(5)])


def test_a_layer_decodes_with_the_first_token_at_zero():
    layer = effattn.nn.SelfAttention(8, 2, "stick_breaking", rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
    whole = nnx.jit(lambda layer, x: layer(x))(layer, x)
    extend = nnx.jit(lambda layer, x, state: layer.extend(x, state))
    first, state = extend(layer, x[:, :4], layer.init_state(2, 7))
    second, _ = extend(layer, x[:, 4:], state)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-6)
    np.testing.assert_array_equal(whole[:, 0], 0)


def test_a_large_logit_hides_all_farther_keys():
    query, key = np.ones((2, 6, 1), np.float32)
    key = key.copy()
    key[3] = 1e4
    found = weights(query, key)
    np.testing.assert_allclose(found[5, :3], 0)
    np.testing.assert_allclose(found[5, 3] + found[5, 4], 1, rtol=1e-6)


def test_hidden_keys_break_off_nothing():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 7, 4)).astype(np.float32)
    mask = np.ones(7, bool)
    mask[4] = False
    found = weights(query, key, mask=mask)
    left = weights(query[[5, 6]], key[mask], query_offset=4)
    np.testing.assert_allclose(found[[5, 6]][:, mask], left, atol=1e-6)


def test_memory_is_linear_in_the_length():
    def bytes_at(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        attend = functools.partial(effattn.stick_breaking_attention, query_tile=8)
        program = jax.jit(jax.grad(lambda x: attend(x, x, x).sum()))
        return cost.temporary_bytes(program.trace(x))

    assert bytes_at(2048) < 2.2 * bytes_at(1024)
    assert bytes_at(2048) < 2048**2


def test_wrong_arguments_are_named():
    x = jnp.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match="query_tile must be an int, 1 or more"):
        effattn.stick_breaking_attention(x, x, x, query_tile=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        effattn.stick_breaking_attention(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="breaks its stick from the nearest key"):
        effattn.nn.SelfAttention(8, 2, "stick_breaking", is_causal=False, rngs=nnx.Rngs(0))
