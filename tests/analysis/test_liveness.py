import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

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


@COMPILERS
def test_what_a_loop_without_steps_and_whole_slices_write_is_what_they_are_given(compiler):
    def function(x):
        start = x @ x
        y = lax.scan(lambda c, _: (c @ x, None), start, None, length=0)[0]
        zeros = jnp.zeros((N, N))
        return lax.dynamic_update_slice(zeros, lax.dynamic_slice(y, (0, 0), (N, N)), (0, 0)) + 0.0

    assert timeline(function, compiler).peak == ARRAY


def test_zeros_that_an_update_at_a_variable_place_writes_to_are_there_from_the_start():
    def function(x):
        y = jnp.sin(x @ x @ x)
        return lax.dynamic_update_slice(jnp.zeros((2 * N, N)), y, (x[0, 0].astype(int), 0))

    def padded(x):
        return lax.dynamic_update_slice(jnp.zeros((2 * N, N)), jnp.sin(x @ x @ x), (N, 0))

    # Two products and the place beside the zeros; a product and the result.
    assert timeline(function, CPU).peak == 4 * ARRAY + 4
    assert timeline(padded, CPU).peak == 3 * ARRAY


def test_all_reduces_that_do_not_wait_for_one_another_are_one_operation():
    def function(x):
        sums = [lax.psum(y @ y, "devices") for y in (x + 1, x @ x)]
        return [jnp.sin(y) @ y for y in sums]

    mesh = AbstractMesh((8,), ("devices",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec("devices"), out_specs=PartitionSpec()
    )
    x = jax.ShapeDtypeStruct((8 * N, N), jnp.float32)
    (call,) = jax.make_jaxpr(mapped)(x).jaxpr.eqns
    closed = jex_core.ClosedJaxpr(call.params["jaxpr"], ())
    together, apart = (
        liveness.timeline(closed, compiler) for compiler in (CPU, CPU._replace(combines=False))
    )
    assert len(together.live) == len(apart.live) - 1


def test_reductions_of_long_axes_read_stored_arrays():
    def positive(x, *shape):
        return (x > 0).astype(jnp.int32).reshape(*shape, -1).sum(-1)

    assert timeline(lambda x: positive(x, N), CPU).peak == ARRAY + 4 * N
    short = 4 * N * N // 32
    assert timeline(lambda x: positive(x, N, N // 32), CPU).peak == short
    assert timeline(lambda x: positive(x, N), ACCELERATOR).peak == 4 * N


def test_a_library_computes_reductions_with_what_nothing_else_reads():
    def alone(x, y):
        return (jnp.exp(x) * y).sum(1)

    def shared(x, y):
        z = jnp.exp(x) * y
        return z.sum(1), z.sum(0)

    def continued(x, y):
        return (x - jnp.exp(x).sum(1, keepdims=True)) * y

    assert timeline(alone, CPU, arguments=2).peak == 4 * N
    assert timeline(shared, CPU, arguments=2).peak == ARRAY + 2 * 4 * N
    assert timeline(shared, ACCELERATOR, arguments=2).peak == 2 * 4 * N
    # Until the result has two readers or more.
    assert timeline(continued, CPU, arguments=2).peak == ARRAY


def gated(x, up, gate, down):
    """Perceptron with a gate."""
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


def normed(x, *weights):
    """With a norm of rows."""
    scale = lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    return x + gated(x * (scale * weights[0][:, 0]), *weights)


def doubled(x, up, *_):
    """Products of all rows before each one, by recursive doubling."""
    y = jnp.tanh(x @ up[:, :64])
    for steps in (1, 2, 4, 8, 16):
        y = y * jnp.pad(y[:-steps], ((steps, 0), (0, 0)), constant_values=1.0)
    return x + y


@pytest.mark.parametrize(("layer", "rows"), [(gated, 512), (normed, 4096), (doubled, 512)])
def test_memory_of_a_compiled_program_on_this_cpu(layer, rows):
    """Four layers, forward and backward, against XLA's buffer assignment."""

    def loss(weights, x):
        for each in weights:
            x = layer(x, *each)
        return jnp.square(x).mean()

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [(of(64, 192), of(64, 192), of(192, 64))] * 4
    traced = jax.jit(jax.value_and_grad(loss)).trace(weights, of(rows, 64))
    memory = traced.lower().compile().memory_analysis()
    compiled = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert liveness.timeline(traced.jaxpr, CPU).peak == pytest.approx(compiled, rel=0.1)
