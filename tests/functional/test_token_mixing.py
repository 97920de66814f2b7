"""Functions of mixers without heads: empty inputs, and the states of packed documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.functional.rwkv4 import Sums
from tests.closeness import close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)
D = X.shape[-1]


def of_poles(method):
    poles = -np.ones((4, 3), np.complex64)
    return lambda x: effattn.s4_convolution(
        x, rate=poles, output=poles, step_size=np.ones(4, np.float32), method=method
    )


POLES = {"rate": -np.ones((2, 3), np.complex64), "output": np.ones((2, 3), np.complex64)}
POLES["step_size"] = np.ones(2, np.float32)
WIDE_POLES = {"rate": -np.ones(3, np.complex64), "input": np.ones((3, 4), np.complex64)}
WIDE_POLES["step_size"] = np.ones(3, np.float32)
MIXINGS = {
    "rwkv4": lambda x: effattn.rwkv4_mixing(x, x, decay=jnp.ones(4), bonus=jnp.ones(4)),
    "rg_lru": lambda x: effattn.rg_lru(x, x, x, log_decay=-jnp.ones(4)),
    "aft": lambda x: effattn.attention_free(x, x, x, is_causal=True),
    "bidirectional aft": lambda x: effattn.attention_free(x, x, x),
    "biased aft": lambda x: effattn.attention_free(
        x, x, x, position_bias=(jnp.ones((9, 2)), jnp.ones((9, 2)))
    ),
    "hyena": lambda x: effattn.hyena_convolution(x[None], x, jnp.ones((1, *x.shape[1:]))),
    "s5": lambda x: effattn.s5_scan(x, **WIDE_POLES, output=jnp.ones((2, 4, 3), jnp.complex64)),
    "h3": lambda x: effattn.h3_mixing(x, x, x, **POLES),
    "long convolution": lambda x: effattn.long_convolution(x, jnp.ones((2, 7, 4))),
    "s4": of_poles("convolution"),
    "s4 in steps": of_poles("recurrence"),
    "factorized synthesizer": lambda x: effattn.factorized_synthesizer_attention(
        x[:, :, None], x[:, :, None], x[:, :, None]
    ),
}


@pytest.mark.parametrize("name", MIXINGS)
@pytest.mark.parametrize("batch, length", [(0, 7), (2, 0)])
def test_there_may_be_no_examples_or_no_tokens(name, batch, length):
    x = jnp.ones((batch, length, 4))
    gradient = jax.eval_shape(jax.grad(lambda x: MIXINGS[name](x).sum()), x)
    assert gradient.shape == x.shape


def test_no_tokens_leave_the_state_as_it_was():
    none, one = np.zeros((2, 0, D), np.float32), np.ones(D, np.float32)
    sums = Sums(*(np.full((2, D), size, np.float32) for size in (0.3, 0.7, 0.2)))
    rate = np.full((D, 3), -1 + 1j, np.complex64)
    states = np.full((2, D, 3), 2j, np.complex64)
    poles = functools.partial(effattn.s4_convolution, rate=rate, output=rate, step_size=one)
    for function, state in (
        (lambda x, **given: effattn.rwkv4_mixing(x, x, decay=one, bonus=one, **given), sums),
        (lambda x, **given: effattn.attention_free(x, x, x, is_causal=True, **given), sums),
        (lambda x, **given: effattn.rg_lru(x, x, x, log_decay=-one, **given), sums.values),
        (functools.partial(poles, method="convolution"), states),
        (functools.partial(poles, method="recurrence"), states),
    ):
        y, after = jax.jit(lambda s, f=function: f(none, initial_state=s, return_state=True))(state)
        assert y.shape == none.shape
        jax.tree.map(np.testing.assert_array_equal, after, state)


def test_the_state_of_packed_documents_is_that_of_the_last_one():
    """Padding may follow the last document."""
    decay, ids = np.ones(D, np.float32), np.repeat([[3, 4, 0]], [2, 4, 3], 1)
    for mix in (
        functools.partial(effattn.rwkv4_mixing, decay=decay, bonus=decay),
        functools.partial(effattn.attention_free, X[:1, :, :], is_causal=True),
    ):
        run = jax.jit(functools.partial(mix, return_state=True))
        _, packed = run(X[:1], X[:1], segment_ids=ids)
        if mix.func is effattn.attention_free:
            mix = functools.partial(effattn.attention_free, X[:1, 2:6], is_causal=True)
        _, alone = mix(X[:1, 2:6], X[:1, 2:6], return_state=True)
        jax.tree.map(close, packed, alone)
