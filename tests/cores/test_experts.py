"""Choice of experts, slots and losses of the router."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.cores import experts


def test_weights_are_probabilities_and_sum_to_one_if_there_are_several():
    logits = jnp.log(jnp.asarray([[[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]]))
    one = experts.route(logits, 1)
    np.testing.assert_array_equal(one.experts, [[[1], [0]]])
    np.testing.assert_allclose(one.weights, [[[0.6], [0.5]]], rtol=1e-6)
    two = experts.route(logits, 2)
    np.testing.assert_array_equal(two.experts, [[[1, 2], [0, 2]]])
    expected = [[[0.6 / 0.9, 0.3 / 0.9], [0.5 / 0.8, 0.3 / 0.8]]]
    np.testing.assert_allclose(two.weights, expected, rtol=1e-6)
    np.testing.assert_allclose(two.probabilities, jnp.exp(logits), rtol=1e-6)


def losses(logits, count, valid=None):
    routing = experts.route(jnp.asarray(logits, jnp.float32), count, valid)
    return experts.statistics(routing, routing.experts < routing.logits.shape[-1])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_losses_are_their_formulas(count):
    logits = np.random.default_rng(0).normal(size=(2, 5, 4))
    valid = np.arange(5) < np.array([5, 2])[:, None]
    stats = losses(logits, count, valid)
    rows = logits[valid]
    p = np.exp(rows) / np.exp(rows).sum(1, keepdims=True)
    chosen = np.argsort(-rows, 1)[:, :count]
    f = np.array([(chosen == i).sum() for i in range(4)]) / chosen.size
    np.testing.assert_allclose(stats.load, f, rtol=1e-6)
    np.testing.assert_allclose(stats.load_balancing_loss, 4 * (f * p.mean(0)).sum(), rtol=1e-6)
    z = np.mean(np.log(np.exp(rows).sum(1)) ** 2)
    np.testing.assert_allclose(stats.router_z_loss, z, rtol=1e-6)


def test_the_balancing_loss_is_one_for_uniform_routing_and_e_for_one_expert():
    likely = 20 * np.eye(4)[None]
    assert float(losses(likely, 1).load_balancing_loss) == pytest.approx(1, rel=1e-6)
    assert float(losses(np.zeros((1, 6, 4)), 2).load_balancing_loss) == 1
    same = np.broadcast_to(40 * np.eye(4)[2], (1, 6, 4))
    assert float(losses(same, 1).load_balancing_loss) == pytest.approx(4, rel=1e-6)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.1, 1.25, 2.0, 7.0])
def test_the_capacity_is_rounded_up(factor):
    exact = Fraction(str(factor))
    tokens = np.arange(1, 3000, dtype=np.int32)
    for count, number in ((1, 3), (2, 10), (6, 64)):
        expected = [math.ceil(exact * count * int(n) / number) for n in tokens]
        np.testing.assert_array_equal(experts.capacity(tokens, count, number, factor), expected)
        traced = jax.jit(lambda n, c=count, e=number: experts.capacity(n, c, e, factor))(tokens)
        np.testing.assert_array_equal(traced, expected)
