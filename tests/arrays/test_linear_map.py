import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.arrays.linear_map import linear_map, with_derivatives

A, X, Y = (np.asarray(x, np.float32) for x in ([2.0, 3.0], [5.0, 7.0], [11.0, 13.0]))


def times(a, x, factor=1.0):
    """A map `a * x` whose transpose is `factor * a * y`, so that its use can be seen."""
    return linear_map(
        lambda known, linear: [known[0] * linear[0]],
        lambda known, cotangents: [factor * known[0] * cotangents[0]],
        [a],
        [x],
    )[0]


def test_its_transpose_is_the_given_one():
    np.testing.assert_array_equal(times(A, X), A * X)
    (found,) = jax.linear_transpose(lambda x: times(A, x, 10.0), X)(Y)
    np.testing.assert_array_equal(found, 10 * A * Y)
    (again,) = jax.linear_transpose(
        lambda y: jax.linear_transpose(lambda x: times(A, x, 10.0), X)(y)[0], Y
    )(X)
    np.testing.assert_array_equal(again, 10 * A * X)


def test_derivatives_in_what_it_knows_are_those_of_jax():
    value, along = jax.jvp(lambda a: times(a, X), (A,), (Y,))
    np.testing.assert_array_equal(value, A * X)
    np.testing.assert_array_equal(along, Y * X)
    _, along = jax.jvp(times, (A, X), (Y, Y))
    np.testing.assert_array_equal(along, Y * X + A * Y)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (None, 1)])
def test_it_can_be_mapped(axes):
    rng = np.random.default_rng(0)
    shapes = {None: (2,), 0: (3, 2), 1: (2, 3)}
    a, x = (rng.normal(size=shapes[axis]).astype(np.float32) for axis in axes)

    def gradients(function):
        return jax.grad(lambda x: jnp.sin(jax.vmap(function, axes)(a, x)).sum())(x)

    def pulled_back(function):
        back = jax.vmap(lambda a, x: jax.vjp(functools.partial(function, a), x)[1](Y)[0], axes)
        return back(a, x)

    for of in (lambda function: jax.vmap(function, axes)(a, x), gradients, pulled_back):
        np.testing.assert_allclose(of(times), of(jnp.multiply), rtol=1e-6)


def cube(power, operands, x):
    return operands["scale"] * x**power, x.sum()


def cube_forward(power, operands, x):
    return cube(power, operands, x), (operands["scale"], x)


def cube_backward(power, residuals, cotangents):
    """Gradients that are ten times too large, so that their use can be seen."""
    (scale, x), (d_y, d_sum) = residuals, cotangents
    d_x = 10 * (scale * power * x ** (power - 1) * d_y + d_sum)
    return {"index": None, "missing": None, "scale": 10 * (x**power * d_y).sum()}, d_x


OPERANDS = {"index": np.int32(3), "missing": None, "scale": np.float32(2.0)}


def test_functions_have_both_modes():
    run = with_derivatives(cube, cube_forward, cube_backward)
    call = functools.partial(run, 3, OPERANDS)
    (y, total), (d_y, d_total) = jax.jvp(call, (X,), (Y,))
    np.testing.assert_allclose(y, 2 * X**3)
    np.testing.assert_allclose(d_y, 6 * X**2 * Y)
    np.testing.assert_allclose((total, d_total), (X.sum(), Y.sum()))
    np.testing.assert_allclose(jax.grad(lambda x: call(x)[0].sum())(X), 60 * X**2)
    by_scale = jax.grad(lambda s: run(3, {**OPERANDS, "scale": s}, X)[0].sum())(np.float32(2.0))
    np.testing.assert_allclose(by_scale, 10 * (X**3).sum())
    # The derivative of the gradient is JAX's derivative of the backward pass.
    _, curved = jax.jvp(jax.grad(lambda x: call(x)[0].sum()), (X,), (Y,))
    np.testing.assert_allclose(curved, 120 * X * Y)


def test_the_form_for_forward_mode_may_be_another():
    def doubled(power, operands, x):
        return jax.tree.map(lambda y: 2 * y, cube(power, operands, x))

    run = with_derivatives(cube, cube_forward, cube_backward, doubled)
    y, d_y = jax.jvp(lambda x: run(2, OPERANDS, x)[0], (X,), (Y,))
    np.testing.assert_allclose(y, 2 * X**2)
    np.testing.assert_allclose(d_y, 8 * X * Y)


def test_operands_without_tangents_get_no_zeros():
    """No array of the size of such an operand is saved for the backward pass."""
    run = with_derivatives(
        lambda _, x, large: x * large.sum(),
        lambda _, x, large: (x * large.sum(), (x, large)),
        lambda _, saved, d_y: (d_y * saved[1].sum(), None),
    )
    large = jnp.ones(1000)
    _, pull_back = jax.vjp(lambda x: run(None, x, large), jnp.ones(()))
    sizes = [leaf.size for leaf in jax.tree.leaves(pull_back)]
    assert sizes.count(1000) == 1, sizes
