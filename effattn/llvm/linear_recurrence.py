"""The linear recurrence without decays on CPUs, in float32.

The first half of the file is the implementation that `effattn.cores` calls; the second half
generates the kernels. XLA computes the terms (query, key, value) of a block of tokens, and a kernel
scans the block. In a normalised recurrence values have a last entry of 1; the kernels append
this entry. The last entry of an output is then the sum of the weights, which divides the output.

A task is one key head, with its query heads. It goes through chunks of `TILE` tokens, and the state
S (F, D) carries the tokens before the chunk. With the queries of a chunk as lanes of vectors, and
A^T = K Q^T of the chunk with a causal mask,

    Y^T = S^T Q^T + V^T A^T,    S += K^T V.

The gradients take two scans. Forward in time, with dA^T = V dY^T under the causal mask,

    dQ^T = S dY^T + K^T dA^T,

and backward in time, with the gradient R (F, D) of the state that later chunks read,

    dV = K R + A^T dY,    dK = V R^T + dA^T Q,    R += Q^T dY.

In a normalised recurrence the output is y = u / z, where u are the first entries and z is the last
entry: then dY is dy / z, and its last entry is -(dy . y) / z. The scan forward in time saves 1 / z
and this last entry, the two factors of each query, for the scan backward in time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.dispatch.places import HEADS, ONCE, SAME
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, Tokens, clear, masked_terms
from effattn.llvm import runtime
from effattn.llvm.primitive import kernel
from effattn.llvm.tiles import TILE, Rows, TileOps, lay_out
from effattn.xla import linear_recurrence as by_xla

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from llvmlite import ir

    from effattn.llvm.codegen import Code
    from effattn.llvm.handlers import Frame, Job

LIMITS = dispatch.Limits(("float32",), others="llvmlite; no decays and no packed documents")


def refusal(config: Config, x: Inputs) -> str | None:
    """Reason why the kernels do not take these inputs, or None."""
    dtypes = [array.dtype for array in jax.tree.leaves((x.state, x.queries, x.keys))]
    for dtype in (*dtypes, config.dtype):
        if reason := LIMITS.refusal(jnp.dtype(dtype)):
            return reason
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    given = [name for name in terms._fields[3:] if getattr(terms, name) is not None]
    given += ["packed documents"] if x.tokens is not None and x.tokens.starts is not None else []
    given += ["empty arrays"] if 0 in (*x.state.shape, *terms.query.shape) else []
    if terms.value.shape[-2] != terms.key.shape[-2]:
        given.append("value heads that share keys")
    if given:
        return f"does not take {' and '.join(given)}"
    return runtime.refusal()


def forward(config: Config, x: Inputs) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    """Returns `((output, state), saved)`; `saved` is the state at the start of every block."""
    return by_xla.forward(config, x, _blocks(x))


def backward(
    config: Config,
    x: Inputs,
    saved: list[jax.Array] | None,
    d_output: jax.Array,
    d_state: jax.Array,
) -> Inputs:
    """Returns the gradients of all inputs but `tokens`, from the last block to the first."""
    return by_xla.backward(config, x, saved, d_output, d_state, _blocks(x))


def _blocks(x):
    """Blocks of tokens whose features take 256 KB a head, and so fit in the cache of a core."""
    features = x.state.shape[-2]
    return by_xla.Blocks(_forward_block, _backward_block, max(2**16 // features // 64, 1) * 64)


def _terms(config, dtype, tokens, parameters, queries, keys):
    plain = config._replace(normalized=False)
    return masked_terms(plain, parameters, queries, keys, tokens, dtype)[:3]


def _forward_block(config, chunk, parameters, state, queries, keys, tokens):
    """A block of consecutive tokens: returns `(state after, outputs)`."""
    terms = _terms(config, state.dtype, tokens, parameters, queries, keys)
    output, after = _kernel(("forward", config.normalized), *terms, state)
    return after, clear(output, tokens.query_mask)


def _backward_block(cotangents, config, chunk, parameters, state, queries, keys, tokens):
    """Gradients of a block, of all inputs but `tokens`."""
    d_after, d_output = cotangents
    of_tokens = functools.partial(_terms, config, state.dtype, tokens)
    terms, to_arguments = jax.vjp(of_tokens, parameters, queries, keys)
    operands = *terms, state, clear(d_output, tokens.query_mask), d_after
    *d_terms, d_state = _kernel(("backward", config.normalized), *operands)
    d_parameters, d_queries, d_keys = to_arguments(tuple(d_terms))
    return d_parameters, d_state, d_queries, d_keys


def _shapes(static, query, key, value, state, *_):
    if static[0] == "backward":
        return query.shape, key.shape, value.shape, state.shape
    return (*query.shape[:-1], value.shape[-1]), state.shape


def _by_xla(static, query, key, value, state, *cotangents):
    direction, normalized = static
    config = Config(lambda _, query, keys: Terms(query, *keys), jnp.float32, normalized)
    x = Inputs(None, state, query, (key, value), Tokens())
    results, saved = by_xla.forward(config, x)
    if direction == "forward":
        return results
    found = by_xla.backward(config, x, saved, *cotangents)
    return found.queries, *found.keys, found.state


def _names(static, *arrays):
    tokens, state = (None, HEADS, None), (HEADS, None, None)
    operands = tokens, tokens, tokens, state
    if static[0] == "backward":
        return (*operands, tokens, (ONCE, None, None)), operands
    return operands, (tokens, (SAME, None, None))


def _by_kernel(static, shapes, *arrays: Any):
    direction, _ = static
    if direction == "backward":
        rows = shapes[0][:-1]
        shapes = (*shapes, (2, *rows))
    return runtime.call(f"effattn_linear_recurrence_{direction}", shapes, arrays)[:4]


_kernel = kernel("effattn_linear_recurrence", _by_kernel, _by_xla, _shapes, _names)


# Kernels.

# Sizes: `values` is the size of values. `all_values`, the size D of the state, includes the last
# entry of 1 of a normalised recurrence.
_SIZES = "tokens", "heads", "features", "key_heads", "values", "all_values"
_OPERANDS = (
    runtime.Array("query", 3),
    runtime.Array("key", 3),
    runtime.Array("value", 3),
    runtime.Array("state", 3),
)
_FORWARD = runtime.Signature(_OPERANDS, (runtime.Array("out", 3), runtime.Array("state_after", 3)))
_BACKWARD = runtime.Signature(
    (*_OPERANDS, runtime.Array("d_out", 3), runtime.Array("d_after", 3)),
    (
        runtime.Array("d_query", 3),
        runtime.Array("d_key", 3),
        runtime.Array("d_value", 3),
        runtime.Array("d_state", 3),
        runtime.Array("factors", 3),
    ),
)


def write_forward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler (query, key, value, state) -> (out, state_after).

    Arrays are `(*B, T, heads, size)`, and states `(*B, K, F, D)`. If D is the size of values plus
    1, the recurrence is normalised: outputs are divided by their last entry. A batch axis of length
    1 of an argument is broadcast.
    """
    products = _write_products(module, name, lanes)

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scan = _Scan(code, job, products, memory, number, _FORWARD)
        scan.read_state("state")
        with scan.chunks(), scan.heads_then(scan.update_state):
            scan.read("query", "features")
            scan.multiply_out()
            with code.when(scan.is_normalized):
                scan.ops.divide_by_row(scan.scratch["out"], job["values"])
            scan.write("out", "values")
        scan.write_state("state_after")

    _write(module, name, lanes, _FORWARD, task)


def write_backward(module: ir.Module, name: str, lanes: int) -> None:
    """Generates the handler of the gradients.

    (query, key, value, state, d_out, d_after) -> (d_query, d_key, d_value, d_state, factors). A
    gradient has the shape of its array; `d_after` is the gradient of the state after the block, and
    `factors` `(2, *B, T, N)` are saved by the first scan for the second.
    """
    products = _write_products(module, name, lanes)
    factors = ("inverse", 0), ("d_total", 1)

    def forward_in_time(code: Code, scan: _Scan) -> None:
        job, scratch, ops = scan.job, scan.scratch, scan.ops
        scan.read_state("state")
        with scan.chunks(), scan.heads_then(scan.update_state):
            scan.read("query", "features")
            scan.read("d_out", "values")
            with code.when(scan.is_normalized):
                scan.multiply_out()
                ops.quotient_gradient(scratch["out"], scratch["d_out"], job["values"])
                for array, (_, which) in zip(("out", "d_out"), factors, strict=True):
                    last = Rows(code.address(scratch[array], code.mul(job["values"], TILE)), TILE)
                    ops.transpose(last, scan.factor(which), 1, scan.tokens, code.float32(1.0))
            scan.pair("value", scan.value_width, "all_values", "d_out", "d_pairs")
            of_state = scratch["state"], scan.value_width, 1
            scan.multiply(job["features"], job["all_values"], of_state, "d_out", "d_query")
            of_keys = scratch["key"], 1, job["features"]
            scan.add(job["features"], scan.tokens, of_keys, "d_pairs", "d_query")
            scan.write("d_query", "features")

    def backward_in_time(code: Code, scan: _Scan) -> None:
        """Scan backward in time; keeps the gradient R of the state and its transpose R^T."""
        job, scratch, ops = scan.job, scan.scratch, scan.ops
        features, all_values, one = job["features"], job["all_values"], code.float32(1.0)
        width, value_width = scan.width, scan.value_width
        scan.read_state("d_after")
        transposed = Rows(scratch["state_transposed"], width)
        ops.transpose(Rows(scratch["state"], value_width), transposed, features, all_values, one)
        with scan.chunks(reverse=True):
            of_values, of_keys = (scratch["value"], value_width, 1), (scratch["key"], features, 1)
            scan.multiply(scan.tokens, features, of_keys, "state", "d_value", value_width)
            scan.multiply(scan.tokens, all_values, of_values, "state_transposed", "d_key", width)
            with scan.heads():
                scan.read("query", "features")
                scan.read("d_out", "values")
                with code.when(scan.is_normalized):
                    for array, (_, which) in zip(("out", "d_out"), factors, strict=True):
                        last = Rows(
                            code.address(scratch[array], code.mul(job["values"], TILE)), TILE
                        )
                        ops.transpose(scan.factor(which), last, scan.tokens, 1, one)
                    inverse = code.address(scratch["out"], code.mul(job["values"], TILE))
                    ops.multiply(scratch["d_out"], job["values"], inverse)
                scan.pair("key", features, "features", "query", "pairs")
                scan.pair("value", value_width, "all_values", "d_out", "d_pairs")
                for source, rows, size, columns in (
                    ("query", "query_rows", features, width),
                    ("d_out", "d_out_rows", all_values, value_width),
                ):
                    in_rows = Rows(scratch[rows], columns)
                    ops.transpose(Rows(scratch[source], TILE), in_rows, size, scan.tokens, one)
                for left, count, right, to, columns in (
                    ("pairs", scan.tokens, "d_out_rows", "d_value", value_width),
                    ("d_pairs", scan.tokens, "query_rows", "d_key", width),
                    ("query", features, "d_out_rows", "state", value_width),
                    ("d_out", all_values, "query_rows", "state_transposed", width),
                ):
                    scan.add(count, scan.tokens, (scratch[left], TILE, 1), right, to, columns)
            for array, columns, size in (
                ("d_key", width, features),
                ("d_value", value_width, job["values"]),
            ):
                ops.copy(Rows(scratch[array], columns), scan.rows(array), scan.tokens, size)
        scan.write_state("d_state")

    def task(code: Code, job: Job, memory: Any, number: Any) -> None:
        scan = _Scan(code, job, products, memory, number, _BACKWARD)
        forward_in_time(code, scan)
        backward_in_time(code, scan)

    _write(module, name, lanes, _BACKWARD, task)


def _write_products(module: ir.Module, name: str, lanes: int) -> tuple[ir.Function, ir.Function]:
    """Generates the matrix products that set and that add to their result."""
    from effattn.llvm.codegen import vectors_at_once, write_product

    widths = vectors_at_once(lanes)
    return (
        write_product(module, f"{name}_multiply", lanes, widths, "set"),
        write_product(module, f"{name}_add", lanes, widths, "add"),
    )


def _write(module, name, lanes, signature, task):
    from effattn.llvm.handlers import write_handler

    def begin(code: Code, frame: Frame, job: Job) -> tuple[Any, Any]:
        tokens, heads, features = frame.last_sizes(0, 3)
        key_heads, _ = frame.last_sizes(1, 2)
        (values,) = frame.last_sizes(2, 1)
        (all_values,) = frame.last_sizes(3, 1)
        sizes = tokens, heads, features, key_heads, values, all_values
        for each, size in zip(_SIZES, sizes, strict=True):
            job[each] = size
        return code.mul(job["batch"], key_heads), code.add(*_memory(code, job).values())

    write_handler(module, name, lanes, signature, _SIZES, [], begin, task)


def _memory(code: Code, job: Job) -> dict[str, Any]:
    """Sizes of the scratch arrays of a task: of tokens, of pairs of tokens, and of states."""
    width, value_width = (code.round_to_lanes(job[size]) for size in ("features", "all_values"))
    of_features = "key", "query", "query_rows", "d_query", "d_key"
    of_values = "value", "out", "d_out", "d_out_rows", "d_value"
    return {
        **dict.fromkeys(of_features, code.mul(width, TILE)),
        **dict.fromkeys(of_values, code.mul(value_width, TILE)),
        **dict.fromkeys(("pairs", "d_pairs"), TILE * TILE),
        **dict.fromkeys(("state", "state_transposed"), code.mul(width, value_width)),
    }


class _Scan:
    """Scan of one key head over chunks of tokens.

    Attributes:
      scratch: addresses of the scratch arrays of the task.
      width, value_width: sizes of features and of values, rounded up to a multiple of the lanes.
      is_normalized: whether values have a last entry of 1.
      head: the current query head.
      first, tokens: first token of the current chunk, and number of tokens.
    """

    def __init__(
        self,
        code: Code,
        job: Job,
        products: Sequence[Any],
        memory: Any,
        number: Any,
        signature: runtime.Signature,
    ):
        self.code, self.job, self.products, self.number = code, job, products, number
        self.ops = TileOps(code)
        self.scratch, _ = lay_out(code, memory, _memory(code, job))
        self.example = code.div(number, job["key_heads"])
        self.examples = {
            array.name: job.example_of(array.name, self.example) for array in signature.arguments
        }
        self.key_head = code.rem(number, job["key_heads"])
        self.width, self.value_width = (
            code.round_to_lanes(job[s]) for s in ("features", "all_values")
        )
        self.is_normalized = code.less(job["values"], job["all_values"])
        self.head = self.first = self.tokens = code.integer(0)
        with code.when(self.is_normalized), code.loop(0, TILE) as token:
            last = code.add(code.mul(token, self.value_width), job["values"])
            code.store(code.float32(1.0), self.scratch["value"], last)

    # Products of scratch arrays; results have `TILE` columns, one a query, unless `columns` is set

    def multiply(
        self, rows: Any, count: Any, left: Any, right: str, to: str, columns: Any = TILE
    ) -> None:
        """`to (rows, columns) = left (rows, count) right (count, columns)`."""
        self._product(0, rows, count, left, right, to, columns)

    def add(
        self, rows: Any, count: Any, left: Any, right: str, to: str, columns: Any = TILE
    ) -> None:
        """`to (rows, columns) += left (rows, count) right (count, columns)`."""
        self._product(1, rows, count, left, right, to, columns)

    def _product(self, which, rows, count, left, right, to, columns):
        target = self.scratch[to], columns, self.scratch[to]
        arguments = rows, columns, count, *left, self.scratch[right], columns, *target
        self.code.call(self.products[which], *arguments)

    def pair(self, array: str, width: Any, size: str, of_queries: str, to: str) -> None:
        """Inner products of keys, or values, with queries, under a causal mask."""
        self.multiply(self.tokens, self.job[size], (self.scratch[array], width, 1), of_queries, to)
        self.ops.mask_causal(self.scratch[to], self.tokens)

    def multiply_out(self) -> None:
        """Computes Y^T; its last row is the sum of the weights if the recurrence is normalised."""
        count, features = self.job["all_values"], self.job["features"]
        self.multiply(count, features, (self.scratch["state"], 1, self.value_width), "query", "out")
        self.pair("key", features, "features", "query", "pairs")
        self.add(count, self.tokens, (self.scratch["value"], 1, self.value_width), "pairs", "out")

    def update_state(self) -> None:
        """Adds the chunk to the state."""
        features = self.job["features"]
        of_keys = self.scratch["key"], 1, features
        self.add(features, self.tokens, of_keys, "value", "state", self.value_width)

    # Arguments and results

    @contextlib.contextmanager
    def chunks(self, *, reverse: bool = False) -> Iterator[None]:
        """Loops over the chunks; the `with` block generates its body.

        The keys and values of the chunk are copied to the scratch memory first.
        """
        code, job = self.code, self.job
        count = code.ceil(job["tokens"], TILE)
        with code.loop(0, count) as n:
            chunk = code.sub(code.sub(count, 1), n) if reverse else n
            self.first = code.mul(chunk, TILE)
            self.tokens = code.min(code.sub(job["tokens"], self.first), TILE)
            for name, size, width in (
                ("key", "features", job["features"]),
                ("value", "values", self.value_width),
            ):
                to = Rows(self.scratch[name], width)
                self.ops.copy(self.rows(name), to, self.tokens, job[size])
            yield

    @contextlib.contextmanager
    def heads(self) -> Iterator[None]:
        """Loops over the query heads of the key head; the `with` block generates its body."""
        code, job = self.code, self.job
        group = code.div(job["heads"], job["key_heads"])
        first = code.mul(self.key_head, group)
        with code.loop(first, code.add(first, group)) as self.head:
            yield

    @contextlib.contextmanager
    def heads_then(self, last: Any) -> Iterator[None]:
        """Loops over the query heads as `heads`, with the code of `last` after the loop."""
        with self.heads():
            yield
        last()

    def read(self, name: str, size: str) -> None:
        """Reads the chunk of a query-side array, transposed, into scratch memory."""
        to = Rows(self.scratch[name], TILE)
        self.ops.transpose(self.rows(name), to, self.tokens, self.job[size], self.code.float32(1.0))

    def write(self, name: str, size: str) -> None:
        """Writes the chunk of a query-side array from scratch memory, transposed back."""
        source = Rows(self.scratch[name], TILE)
        self.ops.transpose(
            source, self.rows(name), self.job[size], self.tokens, self.code.float32(1.0)
        )

    def rows(self, name: str) -> Rows:
        """Rows of an array for this head, from the current chunk on."""
        of_keys = name in ("key", "value", "d_key", "d_value")
        heads, head = (
            (self.job["key_heads"], self.key_head) if of_keys else (self.job["heads"], self.head)
        )
        size = "features" if name in ("query", "key", "d_query", "d_key") else "values"
        return self._rows(name, heads, head, self.job[size])

    def factor(self, which: int) -> Rows:
        """Rows of one of the `factors`: one element for each token of the current query head."""
        code, job = self.code, self.job
        found = self._rows("factors", job["heads"], self.head, 1)
        of_one = code.mul(which, job["batch"], job["tokens"], job["heads"])
        return Rows(code.address(found.start, of_one), found.step)

    def _rows(self, name, heads, head, size):
        code, job = self.code, self.job
        example = self.examples.get(name, self.example)
        token = code.add(code.mul(example, job["tokens"]), self.first)
        start = code.add(code.mul(token, heads, size), code.mul(head, size))
        return Rows(code.address(job[name], start), code.mul(heads, size))

    def read_state(self, name: str) -> None:
        """Reads the state from an argument."""
        self.ops.copy(*self._states(name), self.job["features"], self.job["all_values"])

    def write_state(self, name: str) -> None:
        """Writes the state to a result."""
        of_xla, own = self._states(name)
        self.ops.copy(own, of_xla, self.job["features"], self.job["all_values"])

    def _states(self, name: str) -> tuple[Rows, Rows]:
        code, (features, size) = self.code, (self.job["features"], self.job["all_values"])
        example = self.examples.get(name, self.example)
        number = code.add(code.mul(example, self.job["key_heads"]), self.key_head)
        of_xla = code.address(self.job[name], code.mul(number, features, size))
        return Rows(of_xla, size), Rows(self.scratch["state"], self.value_width)
