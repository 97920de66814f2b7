"""PaTH attention: its limits, an independent form and wrong arguments."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import dot_product_attention, path_attention

B, T, N, K, H = 2, 10, 4, 2, 4
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fla_memory.npz"
run = jax.jit(functools.partial(path_attention, chunk_size=4))


def draw():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K, K)]


def test_strengths_of_zero_are_exact_attention():
    *heads, reflection = draw()
    out = run(*heads, reflection=reflection, beta=np.zeros((B, T, K), np.float32))
    expected = dot_product_attention(*heads, is_causal=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_reflections_of_one_feature_change_its_sign_at_every_token():
    query, key, value, _ = draw()
    first = np.zeros((B, T, K, H), np.float32)
    first[..., 0] = 1
    out = run(query, key, value, reflection=first, beta=np.full((B, T, K), 2, np.float32))
    signs = np.ones((T, 1, H), np.float32)
    signs[1::2, :, 0] = -1
    expected = dot_product_attention(query * signs, key * signs, value, is_causal=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_outputs_and_gradients_agree_with_flash_linear_attention():
    names = "query", "key", "value", "removal_key", "beta"
    with np.load(GOLDEN) as arrays:
        given = [arrays[name] for name in names]
        right = [arrays["path/output"], *(arrays[f"path/d_{n}"] for n in names)]
        cotangent = arrays["cotangent"]

    @jax.jit
    def outputs_and_gradients(*given):
        def call(*heads):
            return run(*heads[:3], reflection=heads[3], beta=heads[4])

        out, pull_back = jax.vjp(call, *given)
        return out, *pull_back(cotangent)

    for found, expected in zip(outputs_and_gradients(*given), right, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_derivatives_of_forward_mode_are_those_of_reverse_mode():
    *heads, reflection = draw()
    beta = np.full((B, T, K), 0.5, np.float32)

    @jax.jit
    def both(reflection, direction):
        def total(reflection):
            return (run(*heads, reflection=reflection, beta=beta) ** 2).sum()

        _, along = jax.jvp(total, (reflection,), (direction,))
        return along, jnp.vdot(jax.grad(total)(reflection), direction)

    along, expected = both(reflection, draw()[2])
    np.testing.assert_allclose(along, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": np.zeros((B, T + 1, N, H))}, "as many queries as keys.* got 11 and 10"),
        ({"reflection": np.zeros((B, T, N, H))}, r"reflection must be .* \(2, 10, 2, 4\)"),
        ({"beta": np.zeros((B, T, N))}, r"beta must be floating point of shape \(2, 10, 2\)"),
        ({"chunk_size": 0}, "chunk_size must be"),
    ],
)
def test_bad_arguments_are_named(change, message):
    query, key, value, reflection = draw()
    given = {"query": query, "key": key, "value": value, "reflection": reflection}
    with pytest.raises(ValueError, match=message):
        path_attention(**{**given, "beta": np.zeros((B, T, K)), **change})
