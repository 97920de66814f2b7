"""Naive forms as a caller sees them: names, arguments, options and derivatives."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from tests.dense import draw

FUNCTIONS = [n for n in registry.names() if registry.get(n).function is not None]


@pytest.mark.parametrize("name", registry.names())
def test_every_mechanism_has_a_naive_form(name):
    form = getattr(effattn.naive, name)
    assert name in dir(effattn.naive) and callable(form) and form.__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_takes_the_arguments_of_the_fast_form(name):
    function, form = registry.get(name).function, getattr(effattn.naive, name)
    fast = inspect.signature(function).parameters
    assert "implementation" in fast
    assert fast.keys() - {"implementation"} == inspect.signature(form).parameters.keys() - {
        "implementation"
    }


def test_the_option_runs_it():
    arrays = draw(11, 11, dtype=np.float32)
    naive = effattn.naive.softmax(**arrays, is_causal=True)
    for implementation in ("naive", ("naive",), ("mosaic_gpu", "naive"), ["naive", "xla"]):
        out = effattn.dot_product_attention(**arrays, is_causal=True, implementation=implementation)
        np.testing.assert_array_equal(out, naive)
    fast = effattn.dot_product_attention(**arrays, is_causal=True, implementation=("xla", "naive"))
    np.testing.assert_allclose(fast, naive, atol=1e-6)


def test_a_function_with_one_form_takes_the_option_too():
    x = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    fast, naive = (effattn.fourier_mixing(x, implementation=i) for i in ("xla", "naive"))
    np.testing.assert_allclose(fast, naive, atol=1e-5)
    with pytest.raises(NotImplementedError, match="fourier_mixing has the implementations 'xla'"):
        effattn.fourier_mixing(x, implementation="llvm")


def test_arguments_are_checked():
    arrays = draw(11, 11, dtype=np.float32)
    with pytest.raises(ValueError, match="head"):
        effattn.naive.softmax(arrays["query"], arrays["key"][..., :2], arrays["value"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        effattn.naive.softmax(**arrays, window=3)
    with pytest.raises(AttributeError, match="no mechanism is registered as 'nothing'"):
        _ = effattn.naive.nothing


@pytest.mark.parametrize("name", ["softmax", "linear", "retention"])
def test_forward_mode_and_second_derivatives(name, x64):
    arrays = draw(5, 5)
    form = getattr(effattn.naive, name)

    def total(query):
        return jnp.sum(form(**{**arrays, "query": query}) ** 2)

    query, direction = arrays["query"], np.ones_like(arrays["query"])
    _, forward = jax.jvp(total, (query,), (direction,))
    np.testing.assert_allclose(forward, np.sum(jax.grad(total)(query)), rtol=1e-10)
    _, twice = jax.jvp(jax.grad(total), (query,), (direction,))
    reverse = jax.grad(lambda q: jnp.sum(jax.grad(total)(q)))(query)
    np.testing.assert_allclose(twice, reverse, rtol=1e-9, atol=1e-12)


def test_unknown_names_are_refused():
    arrays = draw(5, 5, dtype=np.float32)
    for call in (
        lambda i: effattn.dot_product_attention(**arrays, implementation=i),
        lambda i: effattn.fourier_mixing(arrays["query"][..., 0], implementation=i),
    ):
        with pytest.raises(ValueError, match="unknown implementation 'cuda'; known are .*'naive'"):
            call("cuda")


def test_a_function_without_a_naive_form_says_so():
    query, pages = jnp.ones((1, 1, 1, 8)), jnp.ones((1, 4, 1, 8))
    table = {"block_table": jnp.zeros((1, 1), int), "lengths": jnp.ones(1, int)}
    with pytest.raises(NotImplementedError, match="this function has no naive form"):
        effattn.paged_attention(query, pages, pages, **table, implementation="naive")


DECODING = {
    "bigbird": {"block_size": 3, "num_random_blocks": 1},
    "hierarchical": {"segment_size": 4, "num_summaries": 2},
    "linear": {},
    "longformer": {"local_window_size": (3, 0), "max_global": 2},
    "routing": {"num_clusters": 2, "cluster_size": 4, "local_window_size": 2},
}


@pytest.mark.parametrize("name", DECODING)
def test_modules_with_the_option_decode(name):
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype(np.float32)
    given = {**DECODING[name], "implementation": "naive", "rngs": nnx.Rngs(0)}
    mixer = registry.get(name).build(8, 2, **given)
    state = mixer.init_state(2, 11)
    first, state = mixer.extend(x[:, :6], state)
    rest, state = mixer.extend(x[:, 6:], state)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), mixer(x), atol=2e-6)


def test_modules_take_the_option():
    x = np.random.default_rng(0).normal(size=(2, 9, 8)).astype(np.float32)
    make = lambda i: effattn.nn.SelfAttention(  # noqa: E731
        8, 2, "linear", implementation=i, rngs=nnx.Rngs(0)
    )
    np.testing.assert_allclose(make("naive")(x), make("xla")(x), atol=1e-5)
