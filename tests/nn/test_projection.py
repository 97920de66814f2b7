"""The product of projections: that of JAX, whose reverse mode stores the cotangent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from effattn.nn.layers import Layers
from effattn.nn.projection import dot_general

TRANSFORMS = {
    "none": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad of the weights": lambda f: jax.grad(f, 1),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x, w)),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f), (0, 1))),
    "vmap": lambda f: lambda x, w: jax.vmap(jax.grad(f, 1), (0, None))(jnp.stack([x, 2 * x]), w),
}


def loss_of(product):
    return lambda x, w: jnp.sum(jnp.sin(product(x, w, (((2,), (0,)), ((), ())))))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_is_the_product_of_jax_in_all_transformations(name):
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((2, 3, 4), (4, 5)))
    found, expected = (
        TRANSFORMS[name](loss_of(product))(x, w) for product in (dot_general, lax.dot_general)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), found, expected)


@pytest.mark.parametrize("projection", ["linear", "heads"])
def test_projections_store_the_cotangent_in_reverse_mode_alone(projection):
    make = Layers(rngs=nnx.Rngs(0))
    layer = getattr(make, projection)(8, (2, 4) if projection == "heads" else 8)
    graph, state = nnx.split(layer)

    def loss(state, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

    def barriers(function):
        return jax.jit(function).lower(state, jnp.ones((3, 8))).as_text().count("barrier")

    assert barriers(loss) == 0
    assert barriers(jax.grad(loss)) == 1
