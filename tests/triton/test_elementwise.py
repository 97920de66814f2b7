"""Elementwise functions of the user in the Triton language, and their derivatives."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.pallas.elements import Program, Unsupported
from effattn.testing.functions import assert_close
from effattn.triton import elementwise

kernels = pytest.importorskip("tests.triton.kernels", exc_type=ImportError)
interpreter = pytest.importorskip("effattn.triton.interpreter", exc_type=ImportError)

SLOPES, COUNTS = np.linspace(-1, 1, 7).astype(np.float32), np.arange(7, dtype=np.uint32) + 2**31
FLAGS = np.arange(7) % 3 == 0


@dataclasses.dataclass(frozen=True)
class Functions:
    f: Any
    d_f: Any


FUNCTIONS = {
    "polynomial": lambda x, i: x**3 - 2 * x + x**-2 + i,
    "exponentials": lambda x, i: jnp.exp(x) * jnp.exp2(x) - jnp.log(1 + x * x) + jnp.log1p(x * x),
    "small arguments": lambda x, i: jnp.log1p(x * 1e-3) * 1e3 + jnp.tanh(x * 1e-3) * 1e3,
    "NaN of limits": lambda x, i: jax.lax.clamp(-1.0, jnp.where(i == 2, jnp.nan, x), 1.0),
    "several cases": lambda x, i: jax.lax.select_n(i % 3, x, 2 * x, 3 * x),
    "converted twice": lambda x, i: (
        x + jnp.asarray(3 * SLOPES).astype(jnp.int32).astype(jnp.float32)[i % 7]
    ),
    "functions of 16 bits": lambda x, i: (
        jnp.tanh(x.astype(jnp.bfloat16)) + jnp.exp(x.astype(jnp.float16)).astype(jnp.bfloat16)
    ).astype(jnp.float32),
    "NaN": lambda x, i: jnp.maximum(jnp.where(i == 3, jnp.nan, x), 0.5),
    "bounded": lambda x, i: jnp.tanh(x) + jax.nn.sigmoid(x) + jnp.sin(x) * jnp.cos(x),
    "roots": lambda x, i: jnp.sqrt(1 + x * x) + jax.lax.rsqrt(1 + jnp.square(x)),
    "steps": lambda x, i: jnp.where(i % 3 == 1, x, jnp.abs(x)) + jnp.sign(x) + jnp.floor(x),
    "limits": lambda x, i: jnp.clip(x, -1, 0.5) + jnp.maximum(x, 2 * x) - jnp.minimum(x, 0.1),
    "integers": lambda x, i: x * (i // 2 - (i << 2) + (i >> 1) + (i & 3) + (i | 4) + (i ^ 5) - ~i),
    "negative integers": lambda x, i: x + jax.lax.div(i - 8, 3) + jax.lax.rem(i - 8, 3),
    "bits": lambda x, i: x + (
        (i.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)) >> 16
    ).astype(jnp.int32) + jax.lax.shift_right_logical(i - 8, 28),
    "tables": lambda x, i: (
        jnp.where(jnp.asarray(FLAGS)[i % 7], 1.0, x * jnp.asarray(SLOPES)[i % 7])
        + (jnp.asarray(COUNTS)[i % 7] >> 20).astype(jnp.float32)
    ),
    "conditions": lambda x, i: jnp.where((i > 3) & ~(x < 0) | (i == 0), x, jnp.isfinite(x) * x),
    "16 bits": lambda x, i: x.astype(jnp.bfloat16).astype(jnp.float32) + x,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(name):
    function = FUNCTIONS[name]
    x, i = np.linspace(-2, 2.1, 16).astype(np.float32), np.arange(16, dtype=np.int32)
    scalars = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    program = Program.of(lambda _, *at: function(*at), (), *scalars)
    assert elementwise.refusal(program) is None
    tables = elementwise.tables_of(program.tables)
    plan = Functions(
        elementwise.function("f", program, tables.places),
        elementwise.function("d_f", program, tables.places, derivative=True),
    )
    out, slope = (np.full(16, np.nan, np.float32) for _ in range(2))
    operands = [x, i, *map(np.asarray, (tables.integers, tables.numbers))]
    interpreter.run(kernels.applied, (1,), operands, [out, slope], size=16, plan=plan)
    expected, derivative = jax.vmap(jax.value_and_grad(function))(x, i)
    tolerance = 2e-2 if name == "functions of 16 bits" else 1e-5
    assert_close((out, slope), (expected, derivative), tolerance)


def test_tables_of_64_bits_cannot_be_read():
    with jax.enable_x64(True):
        scalars = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)

        def refusal(table):
            program = Program.of(lambda _, x, i: (x * table[i]).astype(x.dtype), (), *scalars)
            return elementwise.refusal(program)

        assert refusal(jnp.arange(4.0, dtype=jnp.float64)) == "reads an array of float64"
        assert refusal(jnp.arange(4.0, dtype=jnp.float32)) is None


def test_what_cannot_be_written():
    scalars = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    program = Program.of(lambda _, x, y: jnp.atan2(x, y), (), *scalars)
    assert elementwise.refusal(program) == "calls 'atan2', which these kernels do not have"
    with pytest.raises(Unsupported):
        elementwise.source("f", program, ())


def test_equal_functions_are_one_function():
    """Otherwise a kernel would be compiled again for each call."""
    scalars = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    one, other = (
        elementwise.function("f", Program.of(lambda _, x, i: x * i, (), *scalars), ())
        for _ in range(2)
    )
    assert one is other
