"""mLSTM is the recurrence of its paper, in all units of its gates, by XLA and by kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import MLSTMState, dispatch, mlstm_attention
from effattn.testing.functions import assert_close
from tests.marks import slow

BATCH, LENGTH, HEADS, SIZE, VALUE_SIZE = 2, 23, 2, 4, 3


def draw(length=LENGTH, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    of_tokens = BATCH, length, HEADS
    return {
        "query": rng.normal(size=(*of_tokens, SIZE)),
        "key": rng.normal(size=(*of_tokens, SIZE)),
        "value": rng.normal(size=(*of_tokens, VALUE_SIZE)),
        "log_input_gate": spread * rng.normal(size=of_tokens),
        "log_forget_gate": np.log(1 / (1 + np.exp(-spread * rng.normal(size=of_tokens)))),
    }


def run(arrays, **options):
    function = jax.jit(functools.partial(mlstm_attention, return_state=True, **options))
    return jax.tree.map(np.asarray, function(**arrays))


def by_paper(query, key, value, log_input_gate, log_forget_gate):
    """Equations 19 to 27 of the paper, with its stabiliser; values by keys."""
    out = np.zeros_like(value)
    memory = np.zeros((BATCH, HEADS, VALUE_SIZE, SIZE))
    normaliser = np.zeros((BATCH, HEADS, SIZE))
    for b, n in np.ndindex(BATCH, HEADS):
        C, norm, m = memory[b, n], normaliser[b, n], 0.0
        for t in range(value.shape[1]):
            q, k, v = query[b, t, n], key[b, t, n] / SIZE**0.5, value[b, t, n]
            kept, written = log_forget_gate[b, t, n] + m, log_input_gate[b, t, n]
            m = max(kept, written)
            C = np.exp(kept - m) * C + np.exp(written - m) * np.outer(v, k)
            norm = np.exp(kept - m) * norm + np.exp(written - m) * k
            out[b, t, n] = C @ q / max(abs(norm @ q), np.exp(-m))
        memory[b, n], normaliser[b, n] = np.exp(m) * C, np.exp(m) * norm
    return out, memory, normaliser


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_it_is_the_recurrence_of_the_paper(spread):
    arrays = draw(spread=spread)
    with jax.enable_x64(True):
        out, state = run(arrays, chunk_size=4)
    expected, memory, normaliser = by_paper(**arrays)
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-12)
    sums = SIZE**-0.5 * np.exp(state.maximum)[..., None, None] * state.sums
    np.testing.assert_allclose(sums[..., :-1], memory.swapaxes(-1, -2), rtol=1e-9)
    np.testing.assert_allclose(sums[..., -1], normaliser, rtol=1e-9)


def test_open_gates_give_linear_attention_with_a_bounded_normaliser():
    arrays = draw()
    plain = {name: arrays[name] for name in ("query", "key", "value")}
    ones = {**plain, "value": np.ones_like(arrays["value"])}
    open_gates = dict.fromkeys(("log_input_gate", "log_forget_gate"), np.zeros((BATCH, LENGTH, 2)))
    with jax.enable_x64(True):
        out, _ = run({**plain, **open_gates})
        sums, weights = (
            np.asarray(
                effattn.linear_attention(
                    **given, feature_map="identity", normalize=False, is_causal=True
                )
            )
            for given in (plain, ones)
        )
    np.testing.assert_allclose(out, sums / np.maximum(np.abs(weights), 1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gate", [-1e4, 1e4])
def test_gates_of_any_size_give_finite_results(gate):
    """A huge gate of one token outweighs all tokens before it."""
    arrays = {name: x.astype(np.float32) for name, x in draw().items()}
    arrays["log_input_gate"][:, 5] = gate

    def loss(arrays):
        out, state = mlstm_attention(**arrays, return_state=True)
        return jnp.sum(out**2), (out, state)

    results = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))
    out, _ = results[1]
    products = np.einsum("bnh,bnh->bn", arrays["query"][:, 5], arrays["key"][:, 5])
    if gate > 0:
        alone = np.sign(products)[..., None] * arrays["value"][:, 5]
        np.testing.assert_allclose(out[:, 5], alone, rtol=1e-5)


@pytest.mark.parametrize("name", ["triton", slow("mosaic_tpu")])
def test_kernels_agree_with_xla(name):
    arrays = {name: x.astype(np.float32) for name, x in draw(length=70).items()}
    ids = np.repeat([[1, 2, 0], [3, 4, 5]], [40, 28, 2], 1)

    def loss(implementation, arrays):
        out, state = mlstm_attention(
            **arrays, segment_ids=ids, return_state=True, implementation=implementation
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state.sums)), (out, state)

    @functools.partial(jax.jit, static_argnums=0)
    def results(implementation, arrays):
        return jax.value_and_grad(functools.partial(loss, implementation), has_aux=True)(arrays)

    with dispatch.interpreted():
        ours = results(name, arrays)
    assert_close(ours, results("xla", arrays), 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_input_gate": np.zeros((2, 23))}, r"log_input_gate must .*\(2, 23, 2\)"),
        ({"log_forget_gate": np.zeros((2, 23, 2, 4))}, r"log_forget_gate must .*\(2, 23, 2\)"),
        ({"initial_state": np.zeros((2, 2, 4, 4))}, "must be the MLSTMState .* got "),
        (
            {"initial_state": MLSTMState(np.zeros((2, 2, 4, 3)), np.zeros((2, 2)))},
            r"initial_state.sums must .*\(2, 2, 4, 4\)",
        ),
        (
            {"initial_state": MLSTMState(np.zeros((2, 2, 4, 4)), np.zeros(2))},
            r"initial_state.maximum must .*\(2, 2\)",
        ),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        mlstm_attention(**{**draw(), **options})


def test_gradients_are_finite_where_the_gates_grow_and_the_queries_are_zero():
    zeros = jnp.zeros((1, 40, 1, 3))
    growing = jnp.full((1, 40, 1), 10.0)  # exp(-m) is zero in float32 from the tenth token on
    cotangent = jnp.full_like(zeros, 1e4)

    def run(query, key, value, gate):
        out = mlstm_attention(query, key, value, log_input_gate=gate, log_forget_gate=gate)
        return (out * cotangent).sum()

    for gradient in jax.grad(run, (0, 1, 2, 3))(zeros, zeros, zeros, growing):
        assert jnp.isfinite(gradient).all()
