"""Log-linear attention: its limits, an independent form and wrong arguments."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import gated_linear_attention, log_linear_attention
from tests.marks import slow

B, T, N, K, H, L = 2, 21, 4, 2, 4, 4
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fla_memory.npz"
run = jax.jit(functools.partial(log_linear_attention, return_state=True, chunk_size=8))


def draw():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K))
    log_decay = -rng.uniform(0, 1, (B, T, K)).astype(np.float32)
    levels = rng.uniform(0, 1, (B, T, N, L)).astype(np.float32)
    return {"query": query, "key": key, "value": value, "log_decay": log_decay, "levels": levels}


def test_weights_of_one_are_gated_linear_attention():
    given = draw()
    out, state = run(**{**given, "levels": np.ones_like(given["levels"])})
    del given["levels"]
    expected, whole = gated_linear_attention(**given, return_state=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.sums.sum(2), whole, rtol=1e-5, atol=1e-5)


def test_the_last_level_has_all_tokens_that_are_further_away():
    """With 4 levels, the tokens of other blocks of 4 tokens."""
    given = draw()
    given["levels"][..., :-1] = 0
    out, _ = run(**given)
    t = np.arange(T)
    sums = given["log_decay"].cumsum(1).repeat(N // K, 2)
    decay = np.exp(np.minimum(sums[:, :, None] - sums[:, None], 0))
    query, key, value = (
        given[n].repeat(N // given[n].shape[2], 2) for n in ("query", "key", "value")
    )
    far = (t[:, None] // 4 > t // 4)[None, :, :, None]
    weights = far * decay * np.einsum("btnh,bsnh->btsn", query, key) / H**0.5
    expected = given["levels"][..., -1:] * np.einsum("btsn,bsnv->btnv", weights, value)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [4, 16])
@pytest.mark.parametrize("num_levels", [2, slow(3), slow(4), 6])
@pytest.mark.parametrize("options", [{}, {"lengths": True}, {"return_state": True}])
def test_chunks_at_multiples_of_powers_of_two_change_nothing(chunk_size, num_levels, options):
    """Chunks of 3 tokens begin anywhere."""
    given, options = draw(), dict(options)
    given["levels"] = np.random.default_rng(1).uniform(0, 1, (B, T, N, num_levels))
    given = {name: x.astype(np.float64) for name, x in given.items()}
    if options.pop("lengths", False):
        lengths = np.array([T - 2, 6])
        options.update(query_seq_lengths=lengths, key_value_seq_lengths=lengths)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_gradients(size, given):
        def of(given):
            return log_linear_attention(**given, chunk_size=size, **options)

        found, pull_back = jax.vjp(of, given)
        return found, pull_back(
            jax.tree.map(
                lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), found
            )
        )

    with jax.enable_x64(True):
        found, right = (outputs_and_gradients(size, given) for size in (chunk_size, 3))
    assert found[0][0].dtype == np.float64
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11), found, right)


@pytest.mark.parametrize("return_state", [False, True])
def test_a_sequence_without_tokens_has_an_empty_output(return_state):
    given = {name: x[:, :0] for name, x in draw().items()}
    found = log_linear_attention(**given, return_state=return_state)
    out, state = found if return_state else (found, None)
    assert out.shape == (B, 0, N, H)
    assert state is None or not state.sums.any()


def test_decays_of_zero_forget_all_earlier_tokens():
    given = draw()
    given["log_decay"][:, 11] = -np.inf
    out, _ = run(**given)
    changed = {n: given[n].copy() for n in ("key", "value")}
    for x in changed.values():
        x[:, :11] = 7
    np.testing.assert_array_equal(run(**{**given, **changed})[0][:, 11:], out[:, 11:])


def test_outputs_and_gradients_agree_with_flash_linear_attention():
    names = "query", "key", "value", "log_decay", "levels"
    with np.load(GOLDEN) as arrays:
        given = {name: arrays[name] for name in names}
        right = {name: arrays[f"log_linear/d_{name}"] for name in names}
        output, cotangent = arrays["log_linear/output"], arrays["cotangent"]

    @jax.jit
    def outputs_and_gradients(given):
        out, pull_back = jax.vjp(lambda given: run(**given)[0], given)
        return out, pull_back(cotangent)[0]

    out, gradients = outputs_and_gradients(given)
    np.testing.assert_allclose(out, output, rtol=1e-4, atol=1e-5)
    for name, found in gradients.items():
        np.testing.assert_allclose(found, right[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"levels": jnp.zeros((B, T, N, 1))}, "levels must have the weights of 2 levels or more"),
        ({"levels": jnp.zeros((B, T, K, L))}, r"levels must be .* \(2, 21, 4, 4\)"),
        ({"log_decay": jnp.ones((B, T, K))}, "log_decay must be 0 or less"),
        ({"initial_state": jnp.zeros((B, K, L - 1, H, H))}, "must be the LogLinearState"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        log_linear_attention(**{**draw(), **change})
