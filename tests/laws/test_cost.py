"""Law 8: operations and temporary bytes grow with length as the registry says, by count."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.laws import battery, cost

LENGTHS = (2048, 4096, 8192, 16384)


def forward_of(mechanism, is_causal):
    options = dict(mechanism.entry.options)
    if "is_causal" in mechanism.parameters:
        options["is_causal"] = is_causal
    return functools.partial(mechanism.entry.function, **options)


def both_of(function):
    """Forward and backward."""

    def run(query, key, value):
        out, pull_back = jax.vjp(function, query, key, value)
        return pull_back(out)

    return run


def at(length):
    one = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    return one, one, one


def directions(mechanism):
    return [d for d in ("causal", "bidirectional") if mechanism.has(d)]


def test_operations_grow_as_claimed(mechanism):
    for direction in directions(mechanism):
        forward = forward_of(mechanism, direction == "causal")
        for function in (forward, both_of(forward)):
            counts = [cost.operations(function, *at(length)) for length in LENGTHS]
            found = cost.exponent(LENGTHS, counts)
            claimed = mechanism.entry.time_exponent
            print(str(mechanism), direction, found, counts)
            assert claimed - 0.1 <= found <= claimed + 0.1, (direction, counts)


def test_memory_grows_as_claimed(mechanism):
    forward = forward_of(mechanism, directions(mechanism)[0] == "causal")
    for function in (forward, both_of(forward)):
        found = [
            cost.temporary_bytes(function, *at(length), compiler_options=battery.QUICK)
            for length in LENGTHS
        ]
        print(str(mechanism), cost.exponent(LENGTHS, found), found)
        assert cost.exponent(LENGTHS, found) <= mechanism.entry.memory_exponent + 0.1, found


def test_there_is_no_more_to_compile_for_more_tokens(mechanism):
    run = both_of(forward_of(mechanism, directions(mechanism)[0] == "causal"))
    counts = {cost.equations(run, *at(length)) for length in LENGTHS}
    print(counts)
    assert len(counts) == 1, counts


def test_the_count_is_right():
    """Of a loop whose trip count is known only by running it, and of products in closed form."""

    def triangular(x):
        def row(i, total):
            return jax.lax.fori_loop(0, i + 1, lambda j, t: t + x @ x, total)

        return jax.lax.fori_loop(0, 5, row, x)

    x = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    assert cost.operations(triangular, x) == pytest.approx(15 * (2 * 27 + 9), abs=0)
    assert cost.operations(lambda x: jax.lax.map(lambda r: x @ r, x), x) == 3 * 2 * 9
