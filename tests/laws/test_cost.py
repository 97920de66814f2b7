"""Counted operations and temporary bytes grow with the length as the registry claims."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.analysis import cost
from effattn.testing import functions
from effattn.testing.functions import Sizes
from tests.laws.battery import ALSO_OF_CORES, FIRST_OF_CORE, FIRST_OF_FAMILY, MECHANISMS
from tests.marks import slow_but_for


def lengths_of(mechanism):
    """Two lengths, which give the exponent; each further length takes seconds to trace and compile.

    If options follow the length, the square root of each length is an integer that divides it.
    """
    return (2048, 16384) if mechanism.entry.options_at is None else (4096, 65536)


def forward_of(mechanism, direction, length):
    """The XLA form, which can be counted; the growth of the kernels is tested in `tests.llvm`."""
    options = dict(mechanism.entry.options)
    if "implementation" in mechanism.parameters:
        options["implementation"] = "xla"
    if mechanism.entry.options_at is not None:
        options |= mechanism.entry.options_at(length)
    if "is_causal" in mechanism.parameters:
        options["is_causal"] = direction == "causal"
    return functools.partial(mechanism.entry.function, **options)


def both_of(function):
    """The output and the gradients, as a function."""

    def run(arrays):
        out, pull_back = jax.vjp(lambda a: function(**a), arrays)
        return out, pull_back(out)

    return run


# Mechanisms that move packed documents into blocks, whose size follows the length or is large.
MOVED = (
    "block_linformer",
    "hierarchical",
    "learned_blocks",
    "linformer",
    "long_short",
    "moba",
    "native_sparse",
    "nystrom",
)
PACKED = slow_but_for(
    [m for m in MECHANISMS if m.name == "hierarchical"],
    [m for m in MECHANISMS if m.name in MOVED],
)


def arrays_of(mechanism, length):
    sizes = Sizes((1,), length, length, heads=1, key_heads=1, size=16, value_size=16)
    return {
        k: jax.ShapeDtypeStruct(x.shape, jnp.float32)
        for k, x in functions.draw_arrays(mechanism, sizes, everything=False).items()
    }


@functools.cache
def traced(mechanism, direction, length, backward=True, packed=False):
    forward, arrays = forward_of(mechanism, direction, length), arrays_of(mechanism, length)
    if packed:
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def of_documents(arrays, ids):
            return both_of(functools.partial(forward, segment_ids=ids))(arrays)

        return jax.jit(of_documents).trace(arrays, ids)
    return jax.jit(both_of(forward) if backward else lambda a: forward(**a)).trace(arrays)


def directions(mechanism):
    return [d for d in ("causal", "bidirectional") if mechanism.has(d)]


def each_direction():
    """First direction of each mechanism; the other direction is quick for one of each family."""
    for mechanism in MECHANISMS:
        first, *others = directions(mechanism)
        yield pytest.param(mechanism, first, id=f"{mechanism}-{first}")
        marks = () if mechanism in FIRST_OF_FAMILY else pytest.mark.slow
        for other in others:
            yield pytest.param(mechanism, other, id=f"{mechanism}-{other}", marks=marks)


# Mechanisms on cores that have derivatives of their own.
WITH_OWN_DERIVATIVES = FIRST_OF_CORE + [
    subject
    for subject in MECHANISMS
    if subject.name in ("native_sparse", "indexed", "mesa", "block_linformer", "hierarchical")
]


def assert_of_one_size(mechanism, jaxprs):
    """Checks that the length does not change the size of the program, but for its options."""
    most = 1 if mechanism.entry.options_at is None else 1.1
    sizes = [cost.equations(jaxpr) for jaxpr in jaxprs]
    assert max(sizes) <= most * min(sizes), sizes


@pytest.mark.parametrize(("mechanism", "direction"), list(each_direction()))
def test_operations_grow_as_claimed_and_programs_do_not(mechanism, direction):
    """Counts forward and backward together; the size of the jaxpr does not follow the length."""
    lengths = lengths_of(mechanism)
    jaxprs = [traced(mechanism, direction, length).jaxpr for length in lengths]
    counts = [cost.operations(jaxpr) for jaxpr in jaxprs]
    found, claimed = cost.exponent(lengths, counts), mechanism.entry.time_exponent
    assert abs(found - claimed) <= 0.1, (found, counts)
    assert_of_one_size(mechanism, jaxprs)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_no_array_outgrows_the_claim(mechanism):
    """Tests the largest array of the jaxpr, for forward and backward, and for forward alone.

    The number of equations bounds the number of arrays, and does not follow the length. Forward
    alone has a program of its own only in cores with derivatives of their own.
    """
    lengths, direction = lengths_of(mechanism), directions(mechanism)[0]
    for backward in (True, False) if mechanism in WITH_OWN_DERIVATIVES else (True,):
        jaxprs = [traced(mechanism, direction, length, backward).jaxpr for length in lengths]
        assert_of_one_size(mechanism, jaxprs)
        arrays = [cost.largest(jaxpr) for jaxpr in jaxprs]
        most = mechanism.entry.memory_exponent + 0.1
        assert cost.exponent(lengths, arrays) <= most, arrays


@pytest.mark.parametrize("mechanism", PACKED, ids=str)
def test_no_array_of_a_packed_row_outgrows_the_claim(mechanism):
    """In the last direction; the ids of the documents are not known in the program."""
    lengths, direction = lengths_of(mechanism), directions(mechanism)[-1]
    jaxprs = [traced(mechanism, direction, length, packed=True).jaxpr for length in lengths]
    arrays = [cost.largest(jaxpr) for jaxpr in jaxprs]
    assert cost.exponent(lengths, arrays) <= mechanism.entry.memory_exponent + 0.1, arrays


@pytest.mark.parametrize("mechanism", ALSO_OF_CORES, ids=str)
def test_memory_grows_as_claimed(mechanism):
    """Temporary bytes of forward and backward together, in the compiled program."""
    lengths, direction = lengths_of(mechanism), directions(mechanism)[0]
    found = [cost.temporary_bytes(traced(mechanism, direction, length)) for length in lengths]
    assert cost.exponent(lengths, found) <= mechanism.entry.memory_exponent + 0.1, found


@pytest.mark.parametrize("mechanism", FIRST_OF_CORE, ids=str)
def test_forward_mode_takes_no_more_memory_than_claimed(mechanism):
    """Temporary bytes of a derivative along a tangent, in the compiled program."""
    lengths, direction = lengths_of(mechanism), directions(mechanism)[0]

    def of_length(length):
        forward, arrays = forward_of(mechanism, direction, length), arrays_of(mechanism, length)
        along = jax.jit(lambda a, t: jax.jvp(lambda a: forward(**a), (a,), (t,))[1])
        return cost.temporary_bytes(along.trace(arrays, arrays))

    found = [of_length(length) for length in lengths]
    assert cost.exponent(lengths, found) <= mechanism.entry.memory_exponent + 0.1, found


def test_the_count_is_right():
    """The cases are a loop whose trip count is found by running it, and products of known size."""

    def triangular(x):
        def row(i, total):
            return jax.lax.fori_loop(0, i + 1, lambda j, t: t + x @ x, total)

        return jax.lax.fori_loop(0, 5, row, x)

    x = np.ones((3, 3), np.float32)
    assert cost.operations(jax.make_jaxpr(triangular)(x)) == 15 * (2 * 27 + 9)
    by_rows = jax.make_jaxpr(lambda x: jax.lax.map(lambda row: x @ row, x))(x)
    assert cost.operations(by_rows) == 3 * 2 * 9
