"""Code of LSTM, GRU and sLSTM for vectors: one token, forward and backward.

A cell has the four pre-activations of `effattn.xla.cell_recurrence.advance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from effattn.llvm.codegen import Code

Vectors = Sequence[Any]


def _sums(code, of_token, of_state):
    return list(map(code.builder.fadd, of_token, of_state))


def _sums_of_gru(code, of_token, of_state):
    return [*_sums(code, of_token[:2], of_state[:2]), of_token[2], of_state[2]]


class Cell(NamedTuple):
    """The code of a cell.

    Attributes:
      forward: `(code, preactivations, carry before) -> carry after`.
      backward: `(code, preactivations, carry before, gradients of the carry after) ->` gradients of
        the pre-activations, and of the carry before without the path through the pre-activations.
      join: `(code, parts of the token, h R + b) -> preactivations`.
      of_products: `gradients of the pre-activations -> gradients of h R`.
    """

    forward: Callable[[Code, Vectors, Vectors], Vectors]
    backward: Callable[[Code, Vectors, Vectors, Vectors], tuple[Vectors, Vectors]]
    join: Callable[[Code, Vectors, Vectors], Vectors] = _sums
    of_products: Callable[[Vectors], Vectors] = tuple


def _slope_of_sigmoid(code, y):
    """The derivative y (1 - y) of a sigmoid whose value is y."""
    return code.multiply_add(code.negative(y), y, y)


def _slope_of_tanh(code, y):
    """The derivative 1 - y^2 of a tanh whose value is y."""
    return code.multiply_add(code.negative(y), y, code.number(1.0))


def _lstm(code, preactivations, before):
    i, f, g, o = preactivations
    i, f, o = map(code.sigmoid, (i, f, o))
    g, (c, _) = code.tanh(g), before
    c = code.multiply_add(f, c, code.builder.fmul(i, g))
    return i, f, g, o, c, code.tanh(c)


def _lstm_forward(code, preactivations, before):
    *_, o, c, tanh_c = _lstm(code, preactivations, before)
    return c, code.builder.fmul(o, tanh_c)


def _lstm_backward(code, preactivations, before, d_after):
    times, slope = code.builder.fmul, _slope_of_sigmoid
    i, f, g, o, _, tanh_c = _lstm(code, preactivations, before)
    d_c, d_h = d_after
    d_c = code.multiply_add(times(d_h, o), _slope_of_tanh(code, tanh_c), d_c)
    d_preactivations = (
        times(times(d_c, g), slope(code, i)),
        times(times(d_c, before[0]), slope(code, f)),
        times(times(d_c, i), _slope_of_tanh(code, g)),
        times(times(d_h, tanh_c), slope(code, o)),
    )
    return d_preactivations, (times(d_c, f), code.number(0.0))


def _gru(code, preactivations):
    r, z, of_token, of_state = preactivations
    r, z = code.sigmoid(r), code.sigmoid(z)
    return r, z, code.tanh(code.multiply_add(r, of_state, of_token))


def _gru_forward(code, preactivations, before):
    _, z, n = _gru(code, preactivations)
    (h,) = before
    return (code.multiply_add(z, code.builder.fsub(h, n), n),)


def _gru_backward(code, preactivations, before, d_after):
    times, minus, slope = code.builder.fmul, code.builder.fsub, _slope_of_sigmoid
    r, z, n = _gru(code, preactivations)
    (h,), (d_h,) = before, d_after
    kept = times(d_h, z)
    d_n = times(minus(d_h, kept), _slope_of_tanh(code, n))
    d_r = times(times(d_n, preactivations[3]), slope(code, r))
    d_z = times(times(d_h, minus(h, n)), slope(code, z))
    return (d_r, d_z, d_n, times(d_n, r)), (kept,)


def _slstm(code, preactivations, before, is_exp):
    builder = code.builder
    z, log_write, forget, o = preactivations
    c, n, _, m = before
    log_forget = forget if is_exp else code.log_sigmoid(forget)
    log_kept = builder.fadd(log_forget, m)
    # Before the first token there is nothing to keep, whatever the gate.
    is_first = builder.fcmp_ordered("<=", n, code.number(0.0))
    m = code.maximum(builder.select(is_first, log_write, log_kept), log_write)
    written = code.decay(builder.fsub(log_write, m))
    kept = code.decay(builder.fsub(log_kept, m))
    kept = builder.select(is_first, code.number(0.0), kept)
    z, o = code.tanh(z), code.sigmoid(o)
    c = code.multiply_add(kept, c, builder.fmul(written, z))
    n = code.multiply_add(kept, n, written)
    return z, o, written, kept, c, n, m


def _slstm_forward(is_exp):
    def forward(code, preactivations, before):
        _, o, _, _, c, n, m = _slstm(code, preactivations, before, is_exp)
        return c, n, code.builder.fmul(o, code.builder.fdiv(c, n)), m

    return forward


def _slstm_backward(is_exp):
    def backward(code, preactivations, before, d_after):
        times, slope = code.builder.fmul, _slope_of_sigmoid
        z, o, written, kept, c, n, _ = _slstm(code, preactivations, before, is_exp)
        d_c, d_n, d_h, _ = d_after
        mean = code.builder.fdiv(c, n)
        of_mean = code.builder.fdiv(times(d_h, o), n)
        d_c = code.builder.fadd(d_c, of_mean)
        d_n = code.builder.fsub(d_n, times(of_mean, mean))
        d_written = times(code.multiply_add(d_c, z, d_n), written)
        d_kept = code.multiply_add(d_c, before[0], times(d_n, before[1]))
        d_log_forget = times(d_kept, kept)
        if not is_exp:
            d_log_forget = times(d_log_forget, code.sigmoid(code.negative(preactivations[2])))
        d_preactivations = (
            times(times(d_c, written), _slope_of_tanh(code, z)),
            d_written,
            d_log_forget,
            times(times(d_h, mean), slope(code, o)),
        )
        nothing = code.number(0.0)
        return d_preactivations, (times(d_c, kept), times(d_n, kept), nothing, nothing)

    return backward


CELLS = {
    "lstm": Cell(_lstm_forward, _lstm_backward),
    "gru": Cell(_gru_forward, _gru_backward, _sums_of_gru, lambda d: (d[0], d[1], d[3])),
    "slstm": Cell(_slstm_forward(False), _slstm_backward(False)),
    "slstm_exp": Cell(_slstm_forward(True), _slstm_backward(True)),
}
