"""Properties that all recurrences have through their shared arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from tests.marks import slow_but_for

MILLION = 2**20


def shapes(length, *, gate=None, beta=False):
    """Shapes of the arguments for one example and one head of size 64."""
    token = jax.ShapeDtypeStruct((length, 1, 64), jnp.float32)
    given = {"query": token, "key": token, "value": token}
    if gate is not None:
        given["log_decay"] = jax.ShapeDtypeStruct((length, 1, 64)[:gate], jnp.float32)
    if beta:
        given["beta"] = jax.ShapeDtypeStruct((length, 1), jnp.float32)
    return given


RECURRENCES = {
    "linear": (functools.partial(effattn.linear_attention, is_causal=True), {}),
    "retention": (effattn.retention, {}),
    "a decay of the token": (effattn.gated_linear_attention, {"gate": 2}),
    "decays of features": (effattn.gated_linear_attention, {"gate": 3}),
    "delta rule": (effattn.delta_rule_attention, {"beta": True}),
    "gated delta rule": (effattn.delta_rule_attention, {"gate": 2, "beta": True}),
}
QUICK = ("linear", "decays of features", "gated delta rule")


@pytest.mark.parametrize("name", slow_but_for(QUICK, RECURRENCES))
def test_a_million_tokens_fit(name):
    """A forward call needs less than 3 GB, arguments and output included. Nothing is run."""
    function, options = RECURRENCES[name]
    given = shapes(MILLION, **options)
    memory = jax.jit(lambda given: function(**given)).lower(given).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert total < 3e9
    assert memory.temp_size_in_bytes < 16e6


X = np.ones((5, 2, 4), np.float32)


@pytest.mark.parametrize("scale", [1 + 1j, True, jnp.array(True)])
@pytest.mark.parametrize("function", [effattn.retention, effattn.based_attention])
def test_a_scale_is_a_real_number(function, scale):
    with pytest.raises(
        ValueError, match="scale must be a number or an array of shape .*, got (complex|bool)"
    ):
        function(X, X, X, scale=scale)
    with pytest.raises(ValueError, match="scale must be a number"):
        effattn.dot_product_attention(X, X, X, scale=jnp.asarray(scale))


def test_a_recurrence_has_queries_of_one_head_or_more():
    with pytest.raises(ValueError, match="got 0 query heads and 2 key heads; 1 or more"):
        effattn.retention(X[:, :0], X, X)
    with pytest.raises(ValueError, match="query must have shape"):
        effattn.state_space_duality(X[0, 0], X, X, step_size=X[..., 0], rate=-X[0, :, 0])


def test_decays_may_be_lists():
    """Lists work also under a JAX version that does not convert lists to arrays by itself."""
    decays = -np.ones(X.shape[:-1], np.float32)
    run = functools.partial(effattn.gated_linear_attention, X, X, X)
    np.testing.assert_array_equal(run(log_decay=decays.tolist()), run(log_decay=decays))


@pytest.mark.parametrize("window", [None, 2])
def test_values_may_be_empty_where_weights_are_summed(window):
    run = functools.partial(effattn.based_attention, is_causal=True, local_window_size=window)
    assert jax.eval_shape(run, X, X, X[..., :0]).shape == (5, 2, 0)


def test_a_scale_may_be_an_integer():
    def gradient(scale):
        return jax.grad(lambda x: jnp.sum(effattn.retention(x, X, X, scale=scale)))(X)

    np.testing.assert_array_equal(gradient(1), gradient(1.0))
