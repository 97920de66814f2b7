"""Linear recurrence for TPUs, lowered by Mosaic.

`recurrence_blocks` has the mathematics of a block of tokens, `recurrence_steps` the grid of a
kernel, and `recurrence_kernels` the kernels. A step has all query heads of one value head, so the
number of these query heads is limited (`GROUP_LANES`).
"""

import jax
from jax.experimental import pallas as pl

from effattn import dispatch
from effattn.interfaces.linear_recurrence import Config, Inputs
from effattn.pallas import recurrence
from effattn.pallas.mosaic_tpu import recurrence_kernels
from effattn.pallas.mosaic_tpu.recurrence_steps import LANES

# Largest number of lanes of the query heads of a value head and of their output gradients, with
# which a block of 64 tokens of the backward fits in `recurrence_steps.BUFFERS`.
GROUP_LANES = 8192
LIMITS = dispatch.Limits(("float32", "bfloat16"), 256)


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    dtypes = {array.dtype for array in jax.tree.leaves((x.queries, x.keys))}
    for dtype in (*dtypes, config.dtype):
        if reason := LIMITS.refusal(dtype, 0):
            return reason
    if reason := recurrence.refusal(config, x):
        return reason
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    group = max(terms.query.shape[-2] // x.state.shape[-3], 1)
    lanes = sum(pl.cdiv(size, LANES) * LANES for size in x.state.shape[-2:])
    if group * lanes > GROUP_LANES:
        return (
            f"takes up to {GROUP_LANES // lanes} query heads for each key head of this size, got "
            f"{group}"
        )
    return None


def forward(config: Config, x: Inputs):
    """Returns `((output, state), saved)`; see `effattn.pallas.recurrence.forward`."""
    return recurrence.forward(KERNELS, config, x)


def backward(config: Config, x: Inputs, saved, d_output, d_state) -> Inputs:
    """Returns the gradients of the inputs; see `effattn.pallas.recurrence.backward`."""
    return recurrence.backward(KERNELS, config, x, saved, d_output, d_state)


KERNELS = recurrence.Kernels(recurrence_kernels.forward, recurrence_kernels.backward)
