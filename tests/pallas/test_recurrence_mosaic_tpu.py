"""The TPU kernels of the linear recurrence: interpreted and lowered.

Memory starts as NaN, and races are detected. Results are compared with one token at a time in
float64, and with the XLA form.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.pallas.mosaic_tpu import recurrence_steps
from tests.marks import slow
from tests.pallas.lowering import TRITON, kernel_bytes, kernels_of
from tests.pallas.recurrence_cases import (
    assert_alike,
    assert_near,
    documents,
    draw,
    errors,
    exact,
    in_both_widths,
    of_documents,
    one_document,
    program,
    sixteen_bit_forms,
    with_gradients,
)
from tests.pallas.recurrence_cases import recurrence as run

recurrence = functools.partial(run, names=("mosaic_tpu",))


@pytest.mark.parametrize(
    ("length", "decay", "heads", "sizes", "normalized"),
    [
        slow(1, "feature", (4, 2, 2), (3, 5), False),
        (37, "none", (4, 2, 2), (16, 16), True),
        slow(130, "feature", (2, 1, 1), (5, 9), True),
        slow(70, "head", (2, 2, 4), (140, 130), True),
    ],
)
def test_agrees_with_one_token_at_a_time(length, decay, heads, sizes, normalized):
    args = draw(length, decay, heads, sizes, normalized)
    ours = with_gradients(functools.partial(recurrence, normalized=normalized), *args)
    assert_near(ours, exact(*args, normalized=normalized))


@pytest.mark.parametrize(
    ("length", "decay", "heads"),
    [
        (1100, "token", (2, 1, 1)),  # three steps of three blocks
        slow(1100, "none", (1, 1, 2)),
        slow(700, "feature", (2, 1, 1)),  # two steps of six blocks
        slow(290, "feature", (1, 1, 1)),  # a step of five blocks
    ],
)
def test_states_pass_from_step_to_step(length, decay, heads):
    args = draw(length, decay, heads, (3, 5))
    assert_near(with_gradients(recurrence, *args), exact(*args))


@pytest.mark.slow
def test_steps_are_shorter_where_memory_asks_for_it(monkeypatch):
    monkeypatch.setattr(recurrence_steps, "BUFFERS", 2**20)  # three steps, not one
    args = draw(300, "head", (1, 1, 1), (3, 5))
    assert_near(with_gradients(recurrence, *args), exact(*args))


@pytest.mark.parametrize(
    ("length", "decay", "heads"),
    [
        (60, "token", (4, 2, 2)),  # a block of 64 tokens
        slow(640, "none", (1, 1, 1)),  # two steps of three blocks
        slow(640, "feature", (2, 1, 1)),  # two steps of five blocks, each a piece
        slow(450, "head", (1, 1, 2)),
        slow(700, "feature", (1, 1, 1)),  # two steps of six blocks, in pieces of two
    ],
)
def test_the_delta_form_agrees_with_one_token_at_a_time(length, decay, heads):
    args = draw(length, decay, heads, (5, 9), form="delta")
    assert_near(with_gradients(recurrence, *args), exact(*args))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "form"),
    [
        ("none", "bonus"),
        ("token", "plain"),
        ("feature", "plain"),
        ("none", "delta"),
        ("feature", "own"),
    ],
)
def test_documents_and_masks(decay, form):
    args = draw(103, decay, (2, 1, 1), (5, 6), form=form)
    tokens = documents()
    ours = of_documents(*args, tokens, names=("mosaic_tpu",))
    assert_near(ours, exact(*args, tokens=tokens))


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["token", "feature"])
def test_decays_that_forget_much_or_all(decay):
    """As exact as the XLA form; gradients do not pass through a decay of zero."""
    terms, state = draw(103, decay, (2, 1, 1), (5, 6))
    strong = 40 * terms.log_decay
    strong[:, 20], strong[:, 66] = -1e4, -np.inf
    args = terms._replace(log_decay=strong), state
    ours = of_documents(*args, one_document(), names=("mosaic_tpu",))
    xla = of_documents(*args, one_document(), names=("xla",))
    assert not np.any(ours[1][0].log_decay[:, 66])
    for error, other, size in errors(ours, xla, exact(*args, one_document())):
        assert error <= max(2 * other, 1e-6 * size)


@sixteen_bit_forms
def test_sixteen_bit_inputs_are_read_as_they_are(decay, form, normalized):
    assert_alike(*in_both_widths("mosaic_tpu", decay, form, normalized, jnp.bfloat16))


@pytest.mark.parametrize("dtype", [slow(jnp.float32), jnp.bfloat16])
@pytest.mark.parametrize(
    ("gate", "sizes"), [slow(None, (64, 64)), (2, (96, 255)), slow(3, (128, 80)), slow(3, (6, 5))]
)
def test_it_is_lowered_for_tpus(dtype, gate, sizes):
    given = program(dtype, gate, sizes, "pallas")
    assert kernels_of(*given, platform="tpu") == {"tpu_custom_call"}


@pytest.mark.parametrize("gate", [2, 3])
def test_it_is_lowered_where_float64_is_enabled(gate):
    with jax.enable_x64(True):
        given = program(jnp.float32, gate, (8, 8), "pallas")
        assert kernels_of(*given, platform="tpu") == {"tpu_custom_call"}


@pytest.mark.parametrize(
    ("gate", "delta", "most"),
    [(None, False, 4), (2, False, 2), (3, False, 2), (2, True, 2.6), (3, True, 2.6)],
)
def test_kernels_read_and_write_few_bytes(gate, delta, most):
    """The least: inputs are read forward and backward, their gradients and the output written once.

    The gradient of the output is read once. All have the dtype of the inputs.
    """
    function, arrays, ids = program(jnp.bfloat16, gate, (128, 128), "pallas", delta)
    inputs = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())
    output = 2 * math.prod(arrays["query"].shape)
    found = kernel_bytes(function, arrays, ids, platform="tpu")
    assert found <= most * (3 * inputs + 2 * output)


@pytest.mark.slow
def test_the_delta_rule_is_lowered():
    """Kernels for GPUs are lowered too, if the call accepts any kernel."""
    given = program(jnp.bfloat16, 2, (256, 130), "pallas", delta=True)
    assert kernels_of(*given, platform="tpu") == {"tpu_custom_call"}
    assert kernels_of(*given, platform="cuda") == {TRITON}


@pytest.mark.parametrize(
    ("dtype", "heads", "sizes", "message"),
    [
        (np.float16, (2, 2, 2), (3, 4), "takes float32 and bfloat16, got float16"),
        (np.float32, (34, 1, 1), (3, 4), "takes up to 32 query heads .* got 34"),
        (np.float32, (2, 2, 2), (3, 260), "takes up to 256 features and 256 values"),
    ],
)
def test_what_it_does_not_take(dtype, heads, sizes, message):
    terms, _ = jax.tree.map(dtype, draw(5, "token", heads, sizes))
    attend = functools.partial(effattn.gated_linear_attention, log_decay=terms.log_decay)
    with pytest.raises(NotImplementedError, match=message):
        attend(terms.query, terms.key, terms.value, implementation="mosaic_tpu")
