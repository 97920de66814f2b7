"""The grid of a kernel of the linear recurrence on TPUs: heads, and steps of several blocks.

A TPU core runs the programs of a grid one after the other. A program computes a step of up to 512
tokens of one value head, block by block. Arrays have the axis of heads before the axis of tokens,
as a block is tokens by features. A length that is not a multiple of the tokens of a step is padded.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from effattn.arrays import mesh_axes
from effattn.pallas.mosaic_tpu.recurrence_blocks import FORGETS, Decays, Plan
from effattn.pallas.recurrence import BLOCK, Arrays, How

LANES = 128
# Tokens in a block without decay or with decays of tokens: a whole side of the matrix unit.
WIDE = 128
# Most tokens in a step.
STEP = 512
# Bytes of VMEM for the arrays of a step.
BUFFERS = 2**23

# An operand or a result of a kernel, with the specification of its blocks.
Placed = tuple[Any, pl.BlockSpec]


@dataclasses.dataclass(frozen=True)
class Steps:
    """Division of the tokens into steps.

    Attributes:
      plan: static configuration.
      length: T.
      count: number of steps.
      blocks: blocks in a step.
      is_reversed: whether the grid goes from the last step to the first.
    """

    plan: Plan
    length: int
    count: int
    blocks: int
    is_reversed: bool = False

    @classmethod
    def of(cls, how: How, arrays: Arrays) -> "Steps":
        """Steps of as many tokens as fit, at most `STEP`, all of the same number of blocks."""
        length, plan = arrays.query.shape[1], Plan.of(how, arrays)

        def fitting(tokens):
            """Number of blocks that fit in a step, with the state of each."""
            of_block = 2 * _bytes_of_token(plan, arrays) * tokens + _bytes_of_state(arrays)
            return min(BUFFERS // of_block, STEP // tokens)

        if length > BLOCK and plan.decay != "feature" and fitting(WIDE):
            plan = Plan.of(how, arrays, WIDE)
        count = pl.cdiv(plan.blocks, max(fitting(plan.tokens), 1))
        return cls(plan, length, count, pl.cdiv(plan.blocks, count))

    def reversed(self) -> "Steps":
        """The same steps, from the last to the first."""
        return dataclasses.replace(self, is_reversed=True)

    @property
    def size(self) -> int:
        """Tokens in a step."""
        return self.blocks * self.plan.tokens

    def _at(self, n):
        """The step of tokens at an index of the grid."""
        return self.count - 1 - n if self.is_reversed else n

    def tokens(self, x: jax.Array, share: int = 1, group: int | None = None) -> Placed:
        """`(B, T, heads, size)` as `(B, heads, T', size)`; `share` programs read the same heads."""
        x = jnp.moveaxis(x, 1, 2)
        padding = self.count * self.size - self.length
        x = jnp.pad(x, [(0, 0), (0, 0), (0, padding), (0, 0)])
        return x, self._spec_of_tokens(x.shape[-1], share, group)

    def result(
        self, heads: int, size: int, dtype: Any = jnp.float32, group: int | None = None
    ) -> Placed:
        """A result `(B, heads, T', size)`."""
        shape = self.plan.batch, heads, self.count * self.size, size
        return jax.ShapeDtypeStruct(shape, dtype), self._spec_of_tokens(size, 1, group)

    def _spec_of_tokens(self, size, share, group):
        def place(b, h, n):
            return b, h // share, self._at(n), 0

        return pl.BlockSpec((None, group, self.size, size), place)

    def by_token(self, x: jax.Array) -> jax.Array:
        """The inverse of `tokens`."""
        return jnp.moveaxis(x[:, :, : self.length], 2, 1)

    def decays(self, log_decay: jax.Array | None) -> list[Placed]:
        """Decays of features as tokens, decays of tokens as `(B, V, steps, blocks, C)`."""
        if log_decay is None:
            return []
        finite = jnp.maximum(log_decay.astype(jnp.float32), FORGETS)
        if finite.ndim == 4:
            return [self.tokens(finite)]
        rows, _ = self.tokens(finite[..., None])
        rows = rows.reshape(*rows.shape[:2], self.count, self.blocks, self.plan.tokens)
        shape = None, None, None, self.blocks, self.plan.tokens
        return [(rows, pl.BlockSpec(shape, lambda b, h, n: (b, h, self._at(n), 0, 0)))]

    def once(self, state: jax.Array) -> Placed:
        """A state `(B, V, F, D)`, the same in all steps."""
        return state, pl.BlockSpec((None, None, *state.shape[2:]), lambda b, h, n: (b, h, 0, 0))

    def saved(self, state: jax.Array) -> Placed:
        """States `(B, V, steps, F, D)`, one for each step."""
        *heads, features, values = state.shape
        spec = pl.BlockSpec(
            (None, None, None, features, values), lambda b, h, n: (b, h, self._at(n), 0, 0)
        )
        shape = *heads, self.count, features, values
        return jax.ShapeDtypeStruct(shape, state.dtype), spec

    def call(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[Placed],
        results: Sequence[Placed],
        scratch: Sequence[tuple[int, ...]] = (),
    ) -> Sequence[jax.Array]:
        """Calls a kernel for each value head of each example and each step, in order."""
        plan = self.plan
        arrays = mesh_axes.vary_alike([x for x, _ in inputs])
        varying = jax.typeof(arrays[0]).manual_axis_type
        interpreter = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        return pl.pallas_call(
            functools.partial(kernel, self),
            grid=(plan.batch, plan.value_heads, self.count),
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in results],
            out_shape=[
                jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x, _ in results
            ],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpreter if plan.how.interpreted else False,
            name=f"linear_recurrence{kernel.__name__}",
        )(*arrays)

    # In kernels.

    def each(
        self,
        body: Callable[[Any, Any], None],
        in_order: bool = True,
        prepare: Callable[[Sequence[Any]], Sequence[Any]] = list,
    ) -> None:
        """Calls `body(block, prepared)` for each block of the step, in order or in reverse.

        The code of all blocks is in one piece, so that the compiler overlaps them. With decays of
        features this code is long, and a piece is the body of a loop, with at most two blocks.
        `prepare(blocks)` is called once for a piece, and returns `prepared` of each of its blocks.
        """

        def piece(blocks):
            for block, prepared in zip(blocks, prepare(blocks), strict=True):
                body(block, prepared)

        order: Any = range(self.blocks) if in_order else range(self.blocks - 1, -1, -1)
        if self.plan.decay != "feature" or self.blocks <= 2:
            piece(order)
            return

        together, start = 2 - self.blocks % 2, np.int32(order[0])
        step = np.int32(order[1] - order[0])

        def some(n, carry):
            first = n * np.int32(together)
            piece([start + step * (first + np.int32(more)) for more in range(together)])
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(self.blocks // together), some, 0)

    def rows(self, block: Any) -> Any:
        """The rows of a block."""
        tokens = self.plan.tokens
        if isinstance(block, int):
            return pl.ds(block * tokens, tokens)
        return pl.ds(pl.multiple_of(block * np.int32(tokens), tokens), tokens)

    def decays_of(self, log_decay: Sequence[Any], block: Any) -> Decays:
        """The decays of a block; `log_decay` is a list of one array or none."""
        if not log_decay:
            return Decays(self.plan, None)
        return Decays(self.plan, log_decay[0][self._of_decays(block), :])

    def put_decays(self, log_decay: Any, block: Any, x: jax.Array) -> None:
        """Stores an array in the shape of the log decays of a block."""
        log_decay[self._of_decays(block), :] = x

    def _of_decays(self, block):
        return self.rows(block) if self.plan.decay == "feature" else pl.ds(block, 1)


def _lanes(size):
    return pl.cdiv(size, LANES) * LANES


def _bytes_of_token(plan, arrays):
    """Bytes of the arrays of a token in the backward pass, which has most of them.

    These are the inputs, and in float32 their gradients and d_out; in the delta form also the
    recalled keys and their gradients. The caller doubles the sum, as inputs and results have two
    buffers. Scratch memory has one, so half of its bytes are added here.
    """
    heads = (arrays.query, plan.group), (arrays.key, 1), (arrays.value, 1)
    found = sum(n * _lanes(x.shape[-1]) * (x.dtype.itemsize + 4) for x, n in heads)
    if arrays.scale is not None:  # XLA gives queries with a scale in float32
        found += plan.group * _lanes(arrays.query.shape[-1]) * (4 - arrays.query.dtype.itemsize)
    found += 4 * plan.group * _lanes(arrays.value.shape[-1])
    if plan.has_delta:
        found += 8 * _lanes(arrays.key.shape[-1])
        found += 2 * (_lanes(arrays.value.shape[-1]) + _lanes(plan.tokens))
    return found + 8 * _lanes(arrays.key.shape[-1]) * (plan.decay == "feature")


def _bytes_of_state(arrays):
    return 4 * _lanes(arrays.key.shape[-1]) * _lanes(arrays.value.shape[-1])
