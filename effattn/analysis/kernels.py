"""Check of the kernels of a device: each one, forward and backward, against float64.

Compilers of kernels have had faults at few shapes: tiles of 64, one token or half a tile more than
whole tiles, a single query, a bias in float32 beside 16-bit queries. The cases are these shapes.
"""

import concurrent.futures
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import effattn
from effattn import dispatch
from effattn.arrays import checks
from effattn.dispatch.choice import PLATFORMS

ROWS, HEADS, KEY_HEADS = 2, 4, 2

# The error of a kernel may be TIMES the error of XLA in the same dtype, or ROUNDINGS roundings of
# the dtype, whichever is larger. On GPUs a product in float32 is three products of TensorFloat-32,
# which are exact to 2**-22.
TIMES, ROUNDINGS, ROUNDINGS_ON_GPU = 3.0, 2.0, 8.0

# Errors are relative to the RMS of an array, or to SMALLEST times the largest RMS of the case,
# whichever is larger.
SMALLEST = 1e-3
# An array with an RMS below this share of the largest RMS is zero but for rounding. Its error is
# relative to the largest RMS.
ZERO = 1e-9


class Case(NamedTuple):
    """One call.

    Attributes:
      name: the function and its options.
      call: `(arrays, **options) -> output`.
      arrays: NumPy arrays in float64; arguments with gradients.
      kept: names of the arrays that keep float32 where the others have 16 bits.
    """

    name: str
    call: Callable[..., jax.Array]
    arrays: Mapping[str, np.ndarray]
    kept: frozenset[str] = frozenset()


class Row(NamedTuple):
    """Errors of one kernel in one case, relative to the RMS of each array.

    Attributes:
      case: the function and its options, and the number of queries.
      implementation: name of the implementation.
      dtype: dtype of queries, keys and values.
      errors: RMS errors of the output and of the gradients, by name.
      of_xla: the same for XLA in the same dtype, with products in full precision.
      reason: why the kernel does not take the call, or how it failed; empty if it ran.
      failed: True if the kernel failed, or if an error is too large.
    """

    case: str
    implementation: str
    dtype: str
    errors: Mapping[str, float]
    of_xla: Mapping[str, float]
    reason: str
    failed: bool

    def __str__(self) -> str:
        """Line of a table; empty if the kernel does not take the call."""
        of = f"| {self.case} | {self.implementation} | {self.dtype} |"
        if not self.errors:
            return f"{of} {self.reason} | | | FAILED |" if self.failed else ""
        verdict = "FAILED" if self.failed else "ok"
        error, of_xla = self.errors[self.worst], self.of_xla[self.worst]
        return f"{of} {error:.1e} | {self.worst} | {of_xla:.1e} | {verdict} |"

    @property
    def worst(self) -> str:
        """The array with the largest error relative to what is allowed."""
        return max(self.errors, key=self._excess)

    @property
    def too_large(self) -> bool:
        """True if an error is larger than allowed, or NaN."""
        return any(self._excess(name) > 1 for name in self.errors)

    def _excess(self, name):
        by_three = self.dtype == "float32" and PLATFORMS[self.implementation] == "cuda"
        roundings = ROUNDINGS_ON_GPU if by_three else ROUNDINGS
        allowed = max(roundings * float(jnp.finfo(self.dtype).eps), TIMES * self.of_xla[name])
        error = self.errors[name]
        return np.inf if np.isnan(error) else error / allowed


class Checked(NamedTuple):
    """Result of `check`; `str` gives a Markdown table.

    Attributes:
      device: kind of the device.
      rows: one for each kernel, case and dtype.
    """

    device: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """True if no kernel failed."""
        return not any(row.failed for row in self.rows)

    def __str__(self) -> str:
        lines = [line for line in map(str, self.rows) if line]
        return "\n".join([*heading(), *lines, "", self.verdict] if lines else [self.verdict])

    @property
    def verdict(self) -> str:
        """How many kernels ran and failed, in a sentence."""
        ran = sum(bool(str(row)) for row in self.rows)
        if not ran:
            return "No kernel of effattn runs on this device."
        failed = sum(row.failed for row in self.rows)
        return (
            f"{ran} kernels and calls ran, {failed or 'none'} failed; {len(self.rows) - ran} calls "
            "are not taken by a kernel. Errors are RMS errors relative to the RMS of the array."
        )

    def to_json(self) -> str:
        """The result as JSON, with the versions of JAX and effattn.

        Errors that are not finite, for which JSON has no numbers, are the texts "nan" and "inf".
        """
        about = {"device": self.device, "jax": jax.__version__, "effattn": effattn.__version__}
        rows = [
            {**row._asdict(), "errors": _in_json(row.errors), "of_xla": _in_json(row.of_xla)}
            for row in self.rows
        ]
        return json.dumps({**about, "passed": self.passed, "rows": rows}, indent=1)


def device_kind() -> str:
    """Kind of the device that is checked."""
    return jax.devices()[0].device_kind


def heading() -> list[str]:
    """Lines above the table of a check on this device."""
    return [
        f"Kernels on {device_kind()} with jax {jax.__version__}, against float64.",
        "",
        "| call | kernel | dtype | largest error | of | that of XLA | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]


def _in_json(errors):
    return {name: x if np.isfinite(x) else str(x) for name, x in errors.items()}


@checks.checked
def check(implementations: tuple[str, ...] | None = None) -> Checked:
    """Compares every kernel that can run on this device with float64, forward and backward.

    A kernel fails if it raises, if a result is not finite, or if an RMS error is above 3 times that
    of XLA in the same dtype (with float32 products in full precision) and above two roundings of
    the dtype, or eight of float32 on a GPU. The exact results are those of the naive forms in
    float64 (`effattn.naive`), on the default device. Not checked are decoding from pages, dropout,
    `score_mod`, and cuDNN, whose kernels are not effattn's.

    Most of the time goes to compilation, on all cores. On two cores of a CPU this takes about 15
    seconds; a GPU has two kernels and three dtypes, and takes minutes.

    Args:
      implementations: names of the implementations to check; default all of this platform.

    Returns:
      A `Checked`: print it, and see `passed`. `python -m effattn check` prints it, and its exit
      status is 1 if a kernel failed.

    Raises:
      ValueError: an implementation is unknown or runs on another platform.
    """
    return Checked(device_kind(), tuple(compare(implementations)))


def compare(implementations: tuple[str, ...] | None = None) -> Iterator[Row]:
    """Yields the rows of `check` one by one; its argument and error are those of `check`."""
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    here = [name for name, on in PLATFORMS.items() if on == platform and name != "cudnn"]
    names = here if implementations is None else list(implementations)
    kernels = [name for name, on in PLATFORMS.items() if on is not None]
    allowed, of = (kernels, "") if dispatch.is_interpreted() else (here, f" for {platform}")
    for name in names:
        if name not in allowed:
            raise ValueError(
                f"implementations must be kernels{of}: {', '.join(allowed) or 'none'}; got {name!r}"
            )
    kinds = ("float32",) if platform == "cpu" else ("bfloat16", "float16", "float32")
    dtypes = [jnp.dtype(kind) for kind in kinds]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        # Programs of all cases are compiled while the next ones are traced.
        begun = [_begin(case, names, dtypes, pool) for case in cases()]
        try:
            for compared in begun:
                yield from compared()
        finally:
            pool.shutdown(cancel_futures=True)  # where the caller stops early


def cases() -> Iterator[Case]:
    """The calls that are checked."""
    for tokens in (1, 64, 129, 192, 320):
        for size in (64, 40):
            yield _of_tokens(
                "dot_product_attention causal", effattn.dot_product_attention, tokens, size,
                is_causal=True,
            )  # fmt: skip
    for tokens in (129, 192):
        yield _of_tokens("dot_product_attention", effattn.dot_product_attention, tokens)
        yield _of_tokens(
            "sliding_window_attention", effattn.sliding_window_attention, tokens,
            local_window_size=(50, 0),
        )  # fmt: skip
        ids = jnp.asarray([[1] * 70 + [2] * (tokens - 75) + [0] * 5] * ROWS)
        yield _of_tokens(
            "dot_product_attention of documents", effattn.dot_product_attention, tokens,
            segment_ids=ids,
        )  # fmt: skip
        yield _of_tokens(
            "bigbird_attention", effattn.bigbird_attention, tokens, block_size=64, is_causal=True
        )
        yield _with_bias(tokens)
        yield _of_tokens("linear_attention", effattn.linear_attention, tokens, is_causal=True)
        yield _of_tokens("retention", effattn.retention, tokens)
        yield _gated(tokens)
        yield _delta(tokens)
    yield _one_query()


def _draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def _of_tokens(name, function, tokens, size=64, **options):
    shapes = {"query": HEADS, "key": KEY_HEADS, "value": KEY_HEADS}
    arrays = {
        each: _draw(number, ROWS, tokens, heads, size)
        for number, (each, heads) in enumerate(shapes.items())
    }
    call = functools.partial(function, **options)
    return Case(f"{name}, {tokens} tokens of {size}", lambda a, **how: call(**a, **how), arrays)


def _with_bias(tokens):
    case = _of_tokens("dot_product_attention with bias", effattn.dot_product_attention, tokens)
    arrays = {**case.arrays, "bias": _draw(7, 1, HEADS, tokens, tokens)}
    return case._replace(arrays=arrays, kept=frozenset({"bias"}))


def _gated(tokens):
    case = _of_tokens("gated_linear_attention", effattn.gated_linear_attention, tokens)
    key = case.arrays["key"]

    def call(arrays, **how):
        log_decay = jax.nn.log_sigmoid(arrays["gate"])
        given = {name: x for name, x in arrays.items() if name != "gate"}
        return effattn.gated_linear_attention(**given, log_decay=log_decay, **how)

    return case._replace(call=call, arrays={**case.arrays, "gate": 3 + _draw(8, *key.shape)})


def _delta(tokens):
    case = _of_tokens("delta_rule_attention", effattn.delta_rule_attention, tokens)
    key = case.arrays["key"]
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)

    def call(arrays, **how):
        beta = jax.nn.sigmoid(arrays["gate"])
        given = {name: x for name, x in arrays.items() if name != "gate"}
        return effattn.delta_rule_attention(**given, beta=beta, **how)

    arrays = {**case.arrays, "key": key, "gate": _draw(9, *key.shape[:-1])}
    return case._replace(call=call, arrays=arrays)


def _one_query():
    case = _of_tokens("dot_product_attention of one query", effattn.dot_product_attention, 129)
    return case._replace(arrays={**case.arrays, "query": case.arrays["query"][:, :1]})


def _begin(case, names, dtypes, pool):
    """Traces the programs of a case; returns a function that runs them and yields the rows."""
    rows, programs, arguments = [], {}, {}
    for dtype in dtypes:
        given = {
            name: jnp.asarray(x, jnp.float32 if name in case.kept else dtype)
            for name, x in case.arrays.items()
        }
        arguments[dtype.name] = given
        for name in names:
            row = Row(case.name, name, dtype.name, {}, {}, "", False)
            if reason := _refusal(case, given, name):
                rows.append(row._replace(reason=reason))
            else:
                rows.append(row)
                programs[name, dtype.name] = _program(case, given, name, pool)
        if any(of == dtype.name for _, of in programs):
            with jax.default_matmul_precision("highest"):
                programs["xla", dtype.name] = _program(case, given, "xla", pool)
    with jax.enable_x64(True):
        wide = _in_float64(case.arrays)
        by_definition = _program(case, wide, "naive", pool) if programs else None

    def compared():
        exact, of_xla = {}, {}
        for row in rows:
            if row.reason:
                yield row
                continue
            dtype, given = row.dtype, arguments[row.dtype]
            if dtype not in exact:
                assert by_definition is not None
                with jax.enable_x64(True):
                    exact[dtype] = by_definition(_in_float64(given))
                of_xla[dtype] = _errors(programs["xla", dtype](given), exact[dtype])
            try:
                errors = _errors(programs[row.implementation, dtype](given), exact[dtype])
            except Exception as error:  # whatever a compiler raises
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                yield row._replace(reason=reason, failed=True)
            else:
                measured = row._replace(errors=errors, of_xla=of_xla[dtype])
                yield measured._replace(failed=measured.too_large)

    return compared


def _in_float64(arrays):
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}


def _refusal(case, given, name):
    """The reason why an implementation does not take the call, or an empty string."""
    try:
        jax.eval_shape(functools.partial(case.call, implementation=name), given)
    except NotImplementedError as error:
        return str(error)
    except Exception:  # the run raises it again
        return ""
    return ""


def _program(case, given, implementation, pool):
    """A function of the arrays; it returns output and gradients, as float64 NumPy arrays by name.

    The program is traced here, for arrays like `given`, and compiled in a thread.
    """

    def run(arrays):
        call = functools.partial(case.call, implementation=implementation)
        out, pull_back = jax.vjp(call, arrays)
        cotangent = jnp.sin(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype)
        return {"output": out, **pull_back(cotangent)[0]}

    try:
        compiled = pool.submit(jax.jit(run).lower(given).compile)
    except Exception as error:
        compiled = concurrent.futures.Future()
        compiled.set_exception(error)

    def results(arrays):
        found = compiled.result()(arrays)
        return {name: np.asarray(x, np.float64) for name, x in found.items()}

    return results


def _rms(x):
    return float(np.sqrt(np.mean(x**2)))


def _errors(found, exact):
    # Gradients may be zero: the only key of a query has weight 1.
    largest = max(_rms(x) for x in exact.values())

    def size(x):
        return max(_rms(x), SMALLEST * largest) if _rms(x) > ZERO * largest else largest

    return {name: _rms(found[name] - x) / size(x) for name, x in exact.items()}
