"""TTT-Linear: an independent form, its mini-batches, its memory and wrong arguments."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import TTTState, ttt_linear_attention

B, T, N, K, H, SIZE = 2, 11, 4, 2, 4, 5
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fla_memory.npz"
run = jax.jit(functools.partial(ttt_linear_attention, mini_batch_size=4, return_state=True))


def draw():
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=(B, T, h, H)) for n, h in (("query", N), ("key", K))}
    arrays |= {
        "value": rng.normal(size=(B, T, K, SIZE)),
        "learning_rate": rng.uniform(0, 0.5, (B, T, K)),
        "initial_weights": rng.normal(size=(K, H, SIZE)),
        "initial_bias": rng.normal(size=(K, SIZE)),
        "norm_scale": rng.normal(size=(K, SIZE)),
        "norm_bias": rng.normal(size=(K, SIZE)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def test_a_rate_of_zero_is_the_initial_model():
    given = draw()
    out, state = run(**{**given, "learning_rate": 0 * given["learning_rate"]})
    z = np.einsum(
        "btkgh,khv->btkgv", given["query"].reshape(B, T, K, N // K, H), given["initial_weights"]
    )
    z += given["initial_bias"][:, None]
    z = (z - z.mean(-1, keepdims=True)) / z.std(-1, keepdims=True)
    expected = z * given["norm_scale"][:, None] + given["norm_bias"][:, None]
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=1e-4, atol=1e-4)
    assert not state.now.any()


def test_mini_batches_count_from_the_state():
    """Two calls equal one, if the first call ends within a mini-batch, or after one token."""
    given = draw()
    whole, last = run(**given)
    for border in (1, 6):
        state, outs = None, []
        for part in (slice(0, border), slice(border, T)):
            tokens = {n: given[n][:, part] for n in ("query", "key", "value", "learning_rate")}
            out, state = run(**{**given, **tokens}, initial_state=state)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs, 1), whole, rtol=1e-4, atol=1e-5)
        for found, expected in zip(state, last, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_states_and_gradients_agree_with_flash_linear_attention():
    """From a learned state. The values are those of a model that adds its input."""
    names = "key", "square_value", "norm_scale", "norm_bias", "value_memory", "bias"
    with np.load(GOLDEN) as arrays:
        given = {name: arrays[name] for name in names}
        right = {name: arrays[f"ttt_linear/d_{name}"] for name in names}
        output, cotangent = arrays["ttt_linear/output"], arrays["cotangent_state"]

    @jax.jit
    def states_and_gradients(given):
        def call(given):
            start = jnp.concatenate([given["value_memory"], given["bias"]], 2)
            key, value = given["key"][:, :8], given["square_value"][:, :8]
            _, state = run(
                *(key, key, value - key),
                learning_rate=jnp.full(key.shape[:-1], 0.1),
                initial_weights=jnp.zeros(start.shape[1:2] + (4, 4)),
                initial_bias=jnp.zeros(start.shape[1:2] + (4,)),
                **{name: given[name] for name in ("norm_scale", "norm_bias")},
                initial_state=TTTState(start, start, jnp.zeros(start.shape[:2])),
            )
            return state.now

        state, pull_back = jax.vjp(call, given)
        return state, pull_back(cotangent)[0]

    state, gradients = states_and_gradients(given)
    np.testing.assert_allclose(state, output, rtol=1e-4, atol=1e-4)
    for name, found in gradients.items():
        np.testing.assert_allclose(found, right[name], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"learning_rate": jnp.zeros((B, T, N))}, r"learning_rate must be .* \(2, 11, 2\)"),
        ({"initial_weights": jnp.zeros((K, H, H))}, r"initial_weights must be .* \(2, 4, 5\)"),
        ({"norm_bias": jnp.zeros(SIZE)}, r"norm_bias must be .* \(2, 5\)"),
        ({"mini_batch_size": 0}, "mini_batch_size must be an int, 1 or more tokens"),
        ({"initial_state": jnp.zeros((B, K, H, H))}, "must be the TTTState"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        ttt_linear_attention(**{**draw(), **change})


def test_a_document_without_keys_is_read_by_the_initial_model():
    """All keys of the second document are padding, but its queries are valid."""
    given, border = draw(), 3
    ids = np.broadcast_to(np.where(np.arange(T) < border, 1, 2), (B, T))
    attend = functools.partial(ttt_linear_attention, mini_batch_size=4, **given)
    packed = attend(segment_ids=ids, key_value_seq_lengths=np.full(B, border))
    alone = attend(key_value_seq_lengths=np.zeros(B, int))
    np.testing.assert_allclose(packed[:, border:], alone[:, border:], rtol=1e-5, atol=1e-5)
