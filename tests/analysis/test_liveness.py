import jax
import jax.numpy as jnp
import pytest
from jax import lax

from effattn.analysis import liveness
from effattn.analysis.liveness import ACCELERATOR, CPU

COMPILERS = pytest.mark.parametrize("compiler", [CPU, ACCELERATOR], ids=["cpu", "accelerator"])
N = 64
ARRAY = N * N * 4  # bytes of a float32 matrix


def timeline(function, compiler, *, arguments=1):
    x = jax.ShapeDtypeStruct((N, N), jnp.float32)
    return liveness.timeline(jax.make_jaxpr(function)(*[x] * arguments), compiler)


@COMPILERS
def test_elementwise_operations_are_one_buffer(compiler):
    assert timeline(lambda x: jnp.sin(2 * x + 1) * 3, compiler).peak == ARRAY


@COMPILERS
def test_a_product_stores_what_it_reads_and_what_it_writes(compiler):
    # sin(x), its product with x; then the second product beside the first.
    assert timeline(lambda x: (jnp.sin(x) @ x) @ x, compiler).peak == 2 * ARRAY


@COMPILERS
def test_a_result_lives_to_the_end_and_a_buffer_to_its_last_reader(compiler):
    found = timeline(lambda x: (x @ x, (jnp.sin(x) @ x).sum()), compiler)
    assert found.live[-1] == ARRAY + 4 == found.results[-1]
    assert found.peak == 3 * ARRAY


@COMPILERS
def test_what_no_result_needs_takes_no_memory(compiler):
    def function(x):
        x @ x
        return x.sum()

    assert timeline(function, compiler).peak == 4


def test_cheap_values_are_computed_again_unless_a_reader_waits_for_another():
    def together(x, y):
        z = x * y
        return (z + 1) @ x, (z + 2) @ x

    def in_turn(x, y):
        z = x * y
        return (z + (z + 1) @ x) @ y

    # Without z: one operand and two products, or two operands of a product and its result.
    assert timeline(together, CPU, arguments=2).peak < 5 * ARRAY
    stored = timeline(in_turn, CPU, arguments=2).peak
    without = timeline(lambda x, y: (x + (x + 1) @ x) @ y, CPU, arguments=2).peak
    assert stored == without + ARRAY


def test_accelerators_store_the_smaller_of_a_value_and_its_sources():
    def reads_twice(value):
        return lambda x, y: (value(x @ x, y @ y) @ x) @ (value(x @ x, y @ y) @ y)

    sum_of_two = timeline(reads_twice(lambda a, b: a + b), ACCELERATOR, arguments=2).peak
    function_of_one = timeline(reads_twice(lambda a, b: jnp.sin(a)), ACCELERATOR, arguments=2).peak
    assert function_of_one <= sum_of_two <= 4 * ARRAY


@COMPILERS
def test_recomputation_saves_the_inputs_of_the_layers(compiler):
    def loss(checkpointed, depth):
        def layer(x):
            return jnp.sin(x) @ jnp.cos(x)

        def run(x):
            for _ in range(depth):
                x = (jax.checkpoint(layer) if checkpointed else layer)(x)
            return x.sum()

        return jax.grad(run)

    def growth(checkpointed):
        peaks = [timeline(loss(checkpointed, n), compiler).peak for n in (5, 8)]
        return (peaks[1] - peaks[0]) / 3

    assert growth(True) == ARRAY < growth(False)


@COMPILERS
def test_a_loop_writes_to_buffers_of_its_own(compiler):
    def loop(x):
        return lax.scan(lambda c, _: (c @ x, None), jnp.zeros((N, N)), None, length=5)[0]

    # The carry, and the product inside.
    assert timeline(loop, compiler).peak == 2 * ARRAY


@COMPILERS
def test_a_reduction_by_a_function_is_one_operation(compiler):
    def function(x):
        return lax.reduce(jnp.sin(x) @ x, 1.0, lambda a, b: a * b + 1, (0,))

    found = timeline(function, compiler)
    assert (found.peak, found.live[-1]) == (2 * ARRAY, N * 4)


def test_the_branch_of_the_platform_is_taken():
    def function(x):
        return lax.platform_dependent(
            x, cpu=lambda x: x.sum(), default=lambda x: (jnp.sin(x) @ x).sum()
        )

    assert timeline(function, CPU).peak == 4
    assert timeline(function, ACCELERATOR).peak == 2 * ARRAY


def test_a_gradient_of_a_lookup_is_added_in_place():
    def loss(table, weights):
        return (table[jnp.arange(N)] @ weights @ table.T).sum()

    found = timeline(jax.grad(loss), ACCELERATOR, arguments=2)
    assert found.written[0] == len(found.live) - 2


def test_memory_of_a_compiled_program_on_this_cpu():
    """Perceptron with a gate, forward and backward, against XLA's buffer assignment."""

    def loss(weights, x):
        for up, gate, down in weights:
            x = x + (jax.nn.silu(x @ gate) * (x @ up)) @ down
        return jnp.square(x).mean()

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [(of(64, 192), of(64, 192), of(192, 64))] * 4
    traced = jax.jit(jax.value_and_grad(loss)).trace(weights, of(512, 64))
    memory = traced.lower().compile().memory_analysis()
    compiled = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert liveness.timeline(traced.jaxpr, CPU).peak == pytest.approx(compiled, rel=0.1)
