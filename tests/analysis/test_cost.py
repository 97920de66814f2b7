import jax
import jax.numpy as jnp
import pytest

import effattn
from effattn.analysis import cost
from effattn.dispatch import choice


def counted(function, *shapes):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return cost.operations(jax.make_jaxpr(function)(*shapes))


def test_a_product_counts_multiplications_and_additions():
    assert counted(jnp.matmul, (3, 4), (4, 5)) == 2 * 3 * 4 * 5


def test_each_row_of_a_ragged_product_counts_for_one_group():
    sizes = jnp.array([4, 0, 3])

    def product(x, w):
        return jax.lax.ragged_dot(x, w, sizes)

    shapes = (7, 4), (3, 4, 5)
    assert counted(product, *shapes) == 2 * 7 * 4 * 5
    assert counted(lambda x, w, y: jax.vjp(product, x, w)[1](y), *shapes, (7, 5)) == 6 * 7 * 4 * 5


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x):
        return jax.lax.fori_loop(0, x.shape[0], lambda i, y: y + x[i], jnp.zeros(x.shape[1]))

    assert counted(loop, (7, 5)) == 7 * 5


def test_tiles_that_a_branch_skips_cost_nothing():
    def loop(x):
        def body(i, y):
            return jax.lax.cond(i < 3, lambda y: 2 * y, lambda y: y, y)

        return jax.lax.fori_loop(0, 8, body, x)

    assert counted(loop, (5,)) == 3 * 5


def test_a_scatter_adds_each_update():
    assert counted(lambda x, y: x.at[jnp.array([0, 2])].add(y), (4, 5), (2, 5)) >= 2 * 5


def test_a_loop_that_depends_on_data_is_refused():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    with pytest.raises(NotImplementedError, match="trip count"):
        counted(loop, (3,))


def test_the_exponent_is_the_slope_in_logarithms():
    assert cost.exponent([2, 4, 8], [12, 48, 192]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("function", "options"),
    [(effattn.linear_attention, {}), (effattn.bigbird_attention, {"block_size": 32})],
)
def test_the_xla_form_of_a_call_with_kernels_is_counted(function, options, monkeypatch):
    def count(**how):
        shapes = [jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)] * 3
        call = jax.make_jaxpr(lambda *x: function(*x, is_causal=True, **options, **how))(*shapes)
        return cost.operations(call), "pallas_call" in str(call)

    by_xla = count(implementation="xla")
    monkeypatch.setattr(choice, "_capability", lambda: 9.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    assert count() == (by_xla[0], True) and not by_xla[1]
    jax.clear_caches()
