"""Tasks of consecutive tokens of one key head, whose query heads share the keys of a token.

Forward, a task has a block of `TOKENS` tokens. Backward, a key head has several tasks ("splits").
They share its blocks, each writes gradients of keys and values of its own, and the caller adds
these up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from effattn.llvm import runtime
from effattn.llvm.tiles import TileOps

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Job

TOKENS = 16


def write_products(module: ir.Module, name: str, lanes: int) -> list[ir.Function]:
    """Generates two matrix products: one sets its result, the other adds to it."""
    from effattn.llvm.codegen import vectors_at_once, write_product

    widths = vectors_at_once(lanes)
    return [write_product(module, f"{name}_{each}", lanes, widths, each) for each in ("set", "add")]


class TokenTask:
    """Generates the work of a task. The job has "tokens", "heads", and "splits" if there are any.

    Attributes:
      example: batch index in the results.
      examples: batch index in each argument; axes of length 1 are broadcast.
      split: number of the task among those of its example: forward, the number of its block,
        counted from the last one; backward, that of the first of its blocks.
      token: the present token.
    """

    token: Any

    def __init__(
        self,
        code: Code,
        job: Job,
        scratch: dict[str, Any],
        number: Any,
        signature: runtime.Signature,
        *,
        is_backward: bool = False,
    ):
        self.code, self.job, self.scratch, self.ops = code, job, scratch, TileOps(code)
        self.blocks = code.ceil(job["tokens"], TOKENS)
        self.is_backward = is_backward
        count = job["splits"] if is_backward else self.blocks
        self.example, self.split = code.div(number, count), code.rem(number, count)
        self.examples = {
            array.name: job.example_of(array.name, self.example) for array in signature.arguments
        }

    @staticmethod
    def count(code: Code, job: Job, *, is_backward: bool = False) -> Any:
        """The number of tasks."""
        blocks = code.ceil(job["tokens"], TOKENS)
        return code.mul(job["batch"], job["splits"] if is_backward else blocks)

    @contextlib.contextmanager
    def tokens(self) -> Iterator[None]:
        """Loops over the tokens of the task; the `with` block generates its body."""
        code = self.code
        if self.is_backward:
            blocks: Any = code.loop(self.split, self.blocks, self.job["splits"])
        else:
            # Later tokens may see more keys, so they are started first.
            blocks = contextlib.nullcontext(code.sub(code.sub(self.blocks, 1), self.split))
        with blocks as block:
            first = code.mul(block, TOKENS)
            stop = code.min(code.add(first, TOKENS), self.job["tokens"])
            with code.loop(first, stop) as self.token:
                yield

    def of_token(self, name: str, size: Any) -> Any:
        """Address of the row of the token, in an array of queries with rows of this size."""
        code = self.code
        row = code.mul(self.examples.get(name, self.example), self.job["tokens"])
        return code.address(self.job[name], code.mul(code.add(row, self.token), size))

    def of_key(self, name: str, count: str, key: Any, size: Any) -> Any:
        """Address of the row of a key; in an array of gradients, that of the split.

        `count` names the number of keys of the array in the job.
        """
        code = self.code
        example = self.examples.get(name)
        if example is None:
            example = code.add(code.mul(self.split, self.job["batch"]), self.example)
        row = code.add(code.mul(example, self.job[count]), key)
        return code.address(self.job[name], code.mul(row, size))

    def clear(self, name: str, size: Any) -> None:
        """Sets a scratch array of the heads to zero."""
        self.ops.fill(self.scratch[name], self.code.mul(self.job["heads"], size))

    def read(self, name: str, size: Any, factor: Any) -> None:
        """Reads the row of the token into the scratch array of that name, times a factor."""
        numbers = self.code.mul(self.job["heads"], size)
        self._copy(self.of_token(name, numbers), self.scratch[name], numbers, factor)

    def write(self, name: str, size: Any, factor: Any) -> None:
        """Writes the scratch array of that name to the row of the token, times a factor."""
        numbers = self.code.mul(self.job["heads"], size)
        self._copy(self.scratch[name], self.of_token(name, numbers), numbers, factor)

    def _copy(self, source, target, numbers, factor):
        code, factors = self.code, self.code.all_lanes(factor)
        with code.loop(0, numbers, code.lanes) as at:
            vector = code.builder.fmul(code.load_vector(source, at), factors)
            code.store_vector(vector, target, at)
