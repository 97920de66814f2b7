"""Forgetting attention: its limits, its log-sum-exp, an independent form and wrong arguments."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import dot_product_attention, forgetting_attention

B, T, N, K, H = 2, 24, 4, 2, 8
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fla.npz"


def draw(dtype=np.float32):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(B, T, n, H)).astype(dtype) for n in (N, K, K))
    return query, key, value, -rng.uniform(0, 1, (B, T, N)).astype(np.float32)


def test_gates_of_one_are_exact_attention():
    query, key, value, gates = draw()
    out = forgetting_attention(query, key, value, log_forget=0 * gates, local_window_size=7)
    expected = dot_product_attention(query, key, value, is_causal=True, local_window_size=7)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_a_nearly_closed_gate_is_the_border_of_a_document():
    query, key, value, gates = draw()
    gates[:, 10] = -200
    out = forgetting_attention(query, key, value, log_forget=gates)
    alone = forgetting_attention(
        query[:, 10:], key[:, 10:], value[:, 10:], log_forget=gates[:, 10:]
    )
    np.testing.assert_allclose(out[:, 10:], alone, rtol=1e-4, atol=1e-5)


def test_the_gates_of_documents_before_do_not_round_those_of_the_last():
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2048, 1, 16)).astype(np.float32)
    gates = -10 * rng.uniform(0, 1, (2048, 1)).astype(np.float32)
    arrays = query, key, value
    out, lse = forgetting_attention(
        *arrays,
        log_forget=gates,
        segment_ids=1 + np.arange(2048) // 16,
        return_residual=True,
    )
    alone = forgetting_attention(
        *(x[-16:] for x in arrays), log_forget=gates[-16:], return_residual=True
    )
    np.testing.assert_allclose(out[-16:], alone[0], atol=2e-5)
    np.testing.assert_allclose(lse[-16:], alone[1], atol=2e-5)


def test_the_log_sum_exp_has_the_gates_of_the_query():
    """For queries that stand later in the keys, also past the last one."""
    query, key, value, gates = draw()
    offset = np.array([5, 20])
    _, lse = forgetting_attention(
        query[:, :8], key, value, log_forget=gates, query_offset=offset, return_residual=True
    )
    logits = np.einsum("btnh,bsnh->bnts", query[:, :8], key.repeat(N // K, 2)) / H**0.5
    sums = gates.cumsum(1).swapaxes(1, 2)
    for row in range(B):
        at = offset[row] + np.arange(8)
        own = sums[row][:, np.minimum(at, T - 1), None] - sums[row][:, None]
        masked = np.where(np.arange(T) <= at[:, None], logits[row] + own, -np.inf)
        expected = np.logaddexp.reduce(masked, -1)
        np.testing.assert_allclose(lse[row], expected.T, rtol=1e-5, atol=1e-5)


def test_outputs_and_gradients_agree_with_flash_linear_attention():
    with np.load(GOLDEN) as arrays:
        names = "query", "key", "value", "log_decay"
        given = [arrays[name] for name in names]
        right = [arrays["forgetting/output"], *(arrays[f"forgetting/d_{n}"] for n in names)]
        cotangent = arrays["cotangent"]

    @jax.jit
    def run(*given):
        def call(query, key, value, log_forget):
            return forgetting_attention(query, key, value, log_forget=log_forget, tile=(4, 4))

        out, pull_back = jax.vjp(call, *given)
        return out, *pull_back(cotangent)

    for found, expected in zip(run(*given), right, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gates_stay_in_float32_in_narrow_calls():
    """A sum of 1,000 gates has 10 bits more than bfloat16."""
    query, key, value, _ = (x[:, :1] for x in draw())
    long = [
        jnp.broadcast_to(x, (B, 1000, *x.shape[2:])).astype(jnp.bfloat16)
        for x in (query, key, value)
    ]
    gates = jnp.full((B, 1000, N), -0.01)
    _, lse = forgetting_attention(*long, log_forget=gates, return_residual=True)
    logits = np.einsum(
        "bnh,bnh->bn", *(np.float32(x[:, 0].repeat(N // x.shape[2], 1)) for x in long[:2])
    )
    weights = np.log(np.exp(-0.01 * np.arange(1000)).sum())
    np.testing.assert_allclose(lse[:, -1], logits / H**0.5 + weights, rtol=1e-2)


@pytest.mark.parametrize(
    "gates, message",
    [
        (np.zeros((B, T, K)), r"log_forget must be floating point of shape \(2, 24, 4\)"),
        (np.ones((B, T, N)), "log_forget must be 0 or less, the logarithm of a decay"),
        (np.full((B, T, N), -np.inf), "log_forget must be finite, got -inf; .* pass segment_ids"),
    ],
)
def test_bad_gates_are_named(gates, message):
    query, key, value, _ = draw()
    with pytest.raises(ValueError, match=message):
        forgetting_attention(query, key, value, log_forget=gates)
