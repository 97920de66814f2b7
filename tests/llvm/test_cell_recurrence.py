"""The recurrence of a cell by the CPU kernels, against float64."""

import concurrent.futures
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn.cores.cell_recurrence import cell_recurrence
from effattn.interfaces.cell_recurrence import GATES, STATES, Config, Inputs
from effattn.llvm import runtime
from effattn.nn import GRU, LSTM, SLSTM
from effattn.testing.functions import assert_close
from tests.marks import slow

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)


class Case(NamedTuple):
    """Sizes of a call, and what it does beside reading its tokens in order."""

    batch: tuple[int, ...]
    tokens: int
    heads: int
    size: int
    is_reversed: bool = False
    has_marks: bool = False


CASES = {
    "a token": Case((), 1, 1, 3),
    "chunks and a part": Case((2,), 70, 2, 8),
    "marks from the end": Case((3,), 33, 1, 20, is_reversed=True, has_marks=True),
    "groups of rows": Case((3, 7), 5, 1, 17, has_marks=True),
    "panels and a part": Case((1,), 40, 2, 40, is_reversed=True),
}
TEAMS = {
    "a team": Case((), 40, 1, 200, has_marks=True),
    "a team from the end": Case((2,), 70, 1, 200, is_reversed=True, has_marks=True),
}


def drawn(cell, case):
    """Tokens, recurrent matrices, biases and carry, in float32; and marks."""
    rng = np.random.default_rng(case.tokens)
    heads, size = case.heads, case.size
    shapes = (
        (*case.batch, case.tokens, GATES[cell], heads, size),
        (heads, size, GATES[cell], size),
        (GATES[cell], heads, size),
        (*case.batch, STATES[cell], heads, size),
    )
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays[1] /= np.float32(np.sqrt(size))
    if STATES[cell] == 4:  # a sum of weights is positive
        arrays[3][..., 1, :, :] = np.abs(arrays[3][..., 1, :, :])
    if not case.has_marks:
        return arrays, (None, None)
    of_tokens = (*case.batch, case.tokens)
    return arrays, (rng.random(of_tokens) < 0.2, rng.random(of_tokens) < 0.7)


def call_of(cell, case, marks, implementation):
    def call(*arrays):
        config = Config(cell, arrays[0].dtype, case.is_reversed)
        x = Inputs(*arrays, *marks)
        return cell_recurrence("a cell", config, x, implementation=implementation)

    return call


def with_gradients(cell, case, implementation, dtype):
    arrays, marks = drawn(cell, case)
    call = call_of(cell, case, marks, implementation)

    @jax.jit
    def run(*arrays):
        results, pull_back = jax.vjp(call, *arrays)
        return results, pull_back(jax.tree.map(jnp.cos, results))

    return run(*(x.astype(dtype) for x in arrays))


def assert_exact(cell, case, tolerance=1e-5):
    with jax.enable_x64(True):
        expected = with_gradients(cell, case, "xla", np.float64)
    assert_close(with_gradients(cell, case, "llvm", np.float32), expected, tolerance)


QUICK = "chunks and a part", "marks from the end"


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CASES])
@pytest.mark.parametrize("cell", GATES)
def test_it_agrees_with_float64(cell, name):
    assert_exact(cell, CASES[name])


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("cell", ["gru", "slstm"])
def test_vectors_of_every_width_agree(cell):
    assert_exact(cell, CASES["panels and a part"])


@pytest.fixture
def three_threads(monkeypatch):
    """Kernels for a pool of three threads, whatever this machine has."""
    from effattn.llvm import handlers  # needs llvmlite

    def compile_again():
        jax.clear_caches()
        runtime._compile.cache_clear()

    monkeypatch.setattr(handlers.Frame, "threads", lambda frame: frame.code.integer(3))
    compile_again()
    yield
    compile_again()


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("cell", "name"),
    [("gru", "a team"), ("slstm", "a team")]
    + [slow(cell, "a team from the end") for cell in GATES],
)
def test_threads_share_the_units_of_a_head(cell, name):
    """Three threads have 80, 80 and 40 of 200 units, whoever of them comes."""
    assert_exact(cell, TEAMS[name])


@pytest.mark.usefixtures("three_threads")
def test_programs_that_run_side_by_side_share_the_threads():
    case = Case((), 60, 1, 130)
    arrays, marks = drawn("lstm", case)
    call = jax.jit(call_of("lstm", case, marks, "llvm"))
    expected = call(*arrays)

    def check(_):
        for _ in range(5):
            jax.tree.map(np.testing.assert_array_equal, call(*arrays), expected)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(check, range(6)))


@pytest.mark.parametrize("size", [1, 30, 90, 1e4])
def test_gates_of_any_size_agree(size):
    """In float64, the exponential gates of an sLSTM overflow from 710 on without its stabiliser."""
    case = CASES["chunks and a part"]
    for cell in GATES:
        (tokens, *others), marks = drawn(cell, case)
        tokens = np.float32(size) * tokens
        ours, expected = (
            jax.jit(call_of(cell, case, marks, name))(tokens, *others) for name in ("llvm", "xla")
        )
        assert np.isfinite(expected[0]).all()
        np.testing.assert_allclose(ours[0], expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (None, 0, None, None), (None, None, None, 0)])
def test_under_vmap_each_example_has_its_own_arrays(mapped):
    """Examples with matrices of their own are tasks of their own."""
    case = CASES["chunks and a part"]
    arrays, marks = drawn("gru", case)

    def gradients(implementation, *arrays):
        def loss(*arrays):
            return jnp.sum(call_of("gru", case, marks, implementation)(*arrays)[0] ** 2)

        return jax.grad(loss, argnums=range(4))(*arrays)

    many = [
        x if axis is None else np.stack([x, x / 2, -x])
        for x, axis in zip(arrays, mapped, strict=True)
    ]
    ours, expected = (
        jax.jit(jax.vmap(functools.partial(gradients, name), in_axes=mapped))(*many)
        for name in ("llvm", "xla")
    )
    assert_close(ours, expected, 1e-5)


def test_derivatives_in_forward_mode_are_those_of_xla():
    case = Case((), 6, 2, 3, has_marks=True)
    for cell in ("lstm", "slstm"):
        arrays, marks = drawn(cell, case)

        def product(implementation, *arrays, cell=cell, marks=marks):
            def loss(*arrays):
                return jnp.sum(call_of(cell, case, marks, implementation)(*arrays)[0] ** 2)

            gradient = jax.grad(loss, argnums=range(4))
            return jax.jvp(gradient, arrays, tuple(jnp.cos(x) for x in arrays))

        ours, expected = (
            jax.jit(functools.partial(product, name))(*arrays) for name in ("llvm", "xla")
        )
        assert_close(ours, expected, 1e-4)


@pytest.mark.parametrize("layer", [LSTM, GRU, functools.partial(SLSTM, num_heads=2)])
def test_layers_take_it_for_lengths_documents_and_both_directions(layer):
    def results(implementation, **options: Any):
        mixer = layer(6, is_causal=False, implementation=implementation, rngs=nnx.Rngs(0))
        graph, parameters = nnx.split(mixer)
        x = np.random.default_rng(1).normal(size=(3, 40, 6)).astype(np.float32)

        @jax.jit
        def run(parameters, x):
            def call(parameters, x):
                return nnx.merge(graph, parameters)(x, **options)

            y, pull_back = jax.vjp(call, parameters, x)
            return y, pull_back(jnp.cos(y))

        return run(parameters, x)

    ids = np.repeat([[1, 2, 3, 0], [1, 1, 1, 1], [4, 2, 0, 0]], 10, 1)
    for options in ({"lengths": np.array([40, 0, 17])}, {"segment_ids": ids}):
        assert_close(results("llvm", **options), results("xla", **options), 1e-5)


def test_padding_may_hold_anything():
    """NaN in the padding reaches no output, and no gradient."""
    mixer = SLSTM(6, num_heads=2, implementation="llvm", rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(2, 40, 6)).astype(np.float32)

    @jax.jit
    def run(x):
        y, pull_back = jax.vjp(lambda x: mixer(x, lengths=np.array([40, 17])), x)
        return y, *pull_back(jnp.cos(y))

    results = []
    for filling in (np.nan, 0):
        x[1, 17:] = filling
        results.append(run(x))
    np.testing.assert_array_equal(*(y for y, _ in results))
    np.testing.assert_array_equal(*(d_x[1, :17] for _, d_x in results))


@pytest.mark.devices
def test_each_device_takes_its_heads():
    case = Case((2,), 40, 4, 8)
    arrays, marks = drawn("slstm", case)
    mesh = jax.make_mesh((4,), ("heads",), (AxisType.Auto,), devices=jax.devices()[:4])

    @jax.jit
    def run(*arrays):
        out, pull_back = jax.vjp(lambda *x: call_of("slstm", case, marks, "llvm")(*x)[0], *arrays)
        return out, *pull_back(jnp.cos(out))

    spec = NamedSharding(mesh, PartitionSpec(None, None, None, "heads"))
    placed = jax.device_put(arrays[0], spec), *arrays[1:]
    out, *gradients = run(*placed)
    assert out.sharding.spec[2] == "heads"
    assert_close((out, *gradients), run(*arrays), 1e-6)


def test_other_dtypes_and_empty_arrays_are_refused():
    case = CASES["a token"]
    arrays, marks = drawn("gru", case)
    halves = [x.astype(jnp.bfloat16) for x in arrays]
    for given, reason in (
        (halves, "takes float32, got bfloat16"),
        ([arrays[0][:0], *arrays[1:]], "empty"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            call_of("gru", case, marks, "llvm")(*given)
