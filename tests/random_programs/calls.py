"""Random calls of the functions of query, key and value, against their naive forms in float64."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.testing import Case, functions
from effattn.testing.functions import Extent, Sizes
from tests.cases import FUNCTIONS, projections
from tests.random_programs.errors import compare, jittered, largest_difference

LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100)
LONG = (127, 128, 129, 150, 200)
BATCHES = ((), (1,), (2,), (3,), (2, 1), (1, 2, 2))
HEAD_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 64)
INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
TRANSFORMATIONS = ("jit", "jit", "jit", "constants", "eager", "forward", "remat", "vmap", "scan")
MAPPED = 2

# Comparisons of numbers decide which keys a query sees, and rounding to 16 bits changes these.
COMPARES = frozenset({"routing"})
# Mechanisms that take the ids of tokens, and no pair for queries and keys.
ONE_ARRAY = frozenset(
    {"routing", "bigbird", "random", "block_sparse", "block_linformer", "long_short", "moba"}
)
# Mechanisms whose naive form steps through the tokens.
STATES = frozenset(
    {
        *("mamba", "delta_net", "gated_delta_net", "delta_product", "kimi_delta"),
        *("gated_delta_net_2", "rwkv7"),
    }
)


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """A subject of the battery with drawn options, in which some of its capabilities are unused."""

    name: str
    chosen: Mapping[str, Any]
    case: Case
    unused: frozenset[str]
    variant = ""  # whose own arrays a call has

    entry = functions.Subject.entry
    parameters = functions.Subject.parameters
    per_token = functions.Subject.per_token
    per_head = functions.Subject.per_head
    of_tokens = functions.Subject.of_tokens
    _own = functions.Subject._own

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.chosen)

    def has(self, capability: str) -> bool:
        return capability in self.entry.capabilities - self.unused

    def _replace(self, **_: Any) -> "Drawn":
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that defines a call except its values.

    Attributes:
      integers: dtypes of lengths, ids and offsets, by argument.
      container: "numpy", "jax" or "list", the container of these integers.
      given: names of the arguments without gradient.
      left_out: names of the optional arrays that are not given.
      constant: names of the arrays that have no gradient in this call.
      mapped: for vmap and scan, the mapped axis of each argument that has one more axis.
      dirty: whether padding holds NaN.
    """

    subject: Drawn
    sizes: Sizes
    extent: Extent
    dtype: Any
    value_dtype: Any
    x64: bool
    implementation: Any
    transformation: str
    integers: Mapping[str, np.dtype]
    container: str
    given: frozenset[str]
    left_out: frozenset[str]
    constant: frozenset[str]
    mapped: Mapping[str, int]
    pair: bool
    wild: bool
    dirty: bool
    broadcast: tuple[bool, ...]

    def __str__(self) -> str:
        s = self.sizes
        direction = "causal" if self.extent.is_causal else "bidirectional"
        dtype = jnp.dtype(self.dtype).name
        if self.value_dtype != self.dtype:
            dtype += f"/{jnp.dtype(self.value_dtype).name}"
        options = {k: v for k, v in self.subject.chosen.items() if np.ndim(v) < 2}
        extras = sorted(
            {"score_mod", "soft_cap", "window", "sink", "bias", "state", "scale"}
            & {*filter(self.subject.has, self.subject.entry.capabilities), "scale"} - self.left_out
        )
        integers = {k: str(v) for k, v in self.integers.items() if k in self.given}
        words = [
            f"{self.subject.name} {direction} {options or ''}",
            f"batch {s.batch} T {s.queries} S {s.keys} N {s.heads} K {s.key_heads}",
            f"H {s.size} Hv {s.value_size} {dtype}{' x64' if self.x64 else ''}",
            f"implementation={self.implementation!r} {self.transformation}",
            f"given {sorted(self.given)} {integers} {self.container}",
            f"{extras} simple={self.extent.simple} tuning={self.extent.tuning}",
        ]
        if self.mapped:
            words.append(f"mapped {dict(self.mapped)}")
        if self.constant:
            words.append(f"constant {sorted(self.constant)}")
        words += [word for word in ("pair", "wild", "dirty") if getattr(self, word)]
        return "; ".join(words)


# Drawing of a program


def draw(rng: np.random.Generator, only: re.Pattern[str]) -> "Runner | None":
    """A program, or None if the drawn mechanism does not match `only`."""
    names = list(FUNCTIONS)
    name = names[rng.integers(len(names))]
    if not only.search(name):
        return None
    entry = registry.get(name)

    def coin(probability: float = 0.5) -> bool:
        return bool(rng.random() < probability)

    def one_of(choices):
        return choices[rng.integers(len(choices))]

    ways = [way for way in ("causal", "bidirectional") if way in entry.capabilities]
    is_causal = one_of(ways) == "causal"
    sizes = draw_sizes(rng, entry, is_causal)
    chosen = draw_options(rng, name, sizes)
    # A call uses only some of the options, because one option may hide the effect of another.
    likely = {"state": 0.5, "residual": 0.3, "window": 0.5, "lengths": 0.3, "segments": 0.3}
    optional = {*likely, *("bias", "mask", "score_mod", "soft_cap", "sink", "dropout", "offset")}
    unused = {c for c in sorted(optional) if coin(likely.get(c, 0.6))}
    plain = coin()
    if plain:  # the options that CPU kernels take
        unused |= {"bias", "mask", "score_mod", "soft_cap", "dropout", "offset"}
    subject = Drawn(name, MappingProxyType(chosen), FUNCTIONS[name], frozenset(unused))
    extent = Extent(is_causal, everything=True, simple=coin(), tuning=coin(0.3) and not plain)
    x64 = coin()
    dtypes: list[Any] = [jnp.float32] * 6
    if name not in COMPARES:
        dtypes += [jnp.bfloat16, jnp.float16]
    if x64:
        dtypes += [jnp.float64]
    dtype = one_of(dtypes)
    value_dtype = one_of(dtypes) if coin(0.1) else dtype
    implementation = one_of([None] * 5 + ["xla", "llvm", ("llvm", "xla")])
    transformation = one_of(TRANSFORMATIONS)
    at_once = transformation in ("constants", "eager", "forward")
    container = one_of(("numpy", "jax", "list") if at_once else ("numpy", "jax"))
    given = {"dropout_rng"}
    if subject.has("lengths"):
        sides = [side for side in ("query", "key_value") if coin(0.75)] or ["key_value"]
        given |= {f"{side}_seq_lengths" for side in sides}
    is_self = sizes.queries == sizes.keys
    if subject.has("segments") and functions.takes_segments(subject, extent, is_self):
        given |= {"segment_ids"}
    given |= {n for n, c in (("query_offset", "offset"), ("mask", "mask")) if subject.has(c)}
    given |= subject.case.masks.keys()
    if not (subject.has("dropout") and not extent.simple):
        given -= {"dropout_rng"}
    left_out = {"scale"} if coin() or plain else set()
    arrays = sorted({"query", "key", "value", *subject.case.own(subject.variant, rng, sizes)})
    constant: set[str] = set()
    if coin(0.25) and transformation not in ("vmap", "scan"):
        constant = {name for name in arrays if coin()}
        constant -= {one_of(arrays)}
    mapped = {}
    if transformation in ("vmap", "scan"):
        names = [*arrays, *sorted(given), "cotangents"]
        mapped = {name: 0 for name in names if coin(0.6)} or {one_of(names): 0}
        for array in mapped:
            if transformation == "vmap" and array in arrays and coin(0.2):
                mapped[array] = -1
    pair = sizes.queries != sizes.keys or coin(0.3)
    if name in ONE_ARRAY or is_causal and "state" in entry.capabilities:
        pair = False
    integers = {}
    most = max(sizes.queries, sizes.keys)
    for name in ("query_seq_lengths", "key_value_seq_lengths", "segment_ids", "query_offset"):
        wide_enough = [d for d in INTEGERS if np.iinfo(d).max >= most]
        integers[name] = one_of([np.dtype(np.int32), *wide_enough])
    program = Program(
        subject=subject,
        sizes=sizes,
        extent=extent,
        dtype=dtype,
        value_dtype=value_dtype,
        x64=x64,
        implementation=implementation,
        transformation=transformation,
        integers=integers,
        container=container,
        given=frozenset(given),
        left_out=frozenset(left_out),
        constant=frozenset(constant),
        mapped=mapped,
        pair=pair,
        wild=coin(0.2),
        dirty=coin(),
        broadcast=tuple(coin(0.3) for _ in range(8)),
    )
    return Runner(program)


def draw_length(rng: np.random.Generator) -> int:
    """Number of tokens: mostly up to 100, and often near the edges of tiles."""
    pool = LONG if rng.random() < 0.1 else LENGTHS
    length = pool[rng.integers(len(pool))]
    if length < 16 and rng.random() < 0.7:  # kernels take 16 tokens or more
        length = int(rng.integers(16, 100))
    return length


def draw_sizes(rng: np.random.Generator, entry: Any, is_causal: bool) -> Sizes:
    batch = BATCHES[rng.integers(len(BATCHES))]
    queries = keys = draw_length(rng)
    if entry.name in STATES:
        queries = keys = min(queries, 65)
    if "cross" in entry.capabilities and not is_causal and rng.random() < 0.5:
        keys = draw_length(rng)
    least = {"nystrom": 4, "routing": 5}.get(entry.name, 1)
    queries, keys = max(queries, least), max(keys, least)
    key_heads = int(rng.integers(1, 4))
    groups = int(rng.integers(1, 4)) if "grouped" in entry.capabilities else 1
    size, value_size = (int(HEAD_SIZES[rng.integers(len(HEAD_SIZES))]) for _ in range(2))
    if entry.name == "based" or entry.name in STATES:  # their features grow with squares of sizes
        size, value_size = min(size, 9), min(value_size, 9)
    if entry.name == "retention":
        size += size % 2
    if entry.name == "routing":
        # With two features, the normalised values are signs, so that many tokens would tie.
        size = max(size, 3)
    return Sizes(batch, queries, keys, key_heads * groups, key_heads, size, value_size)


def draw_options(rng, name: str, sizes: Sizes) -> dict[str, Any]:
    """The mechanism's own options for these sizes."""
    variants = FUNCTIONS[name].variants
    labels = list(variants)
    options = dict(variants[labels[rng.integers(len(labels))]])
    options = {**registry.get(name).options, **options}
    length, integers = max(sizes.queries, sizes.keys), rng.integers

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def window():
        one, two = (int(w) for w in integers(0, (4, 20, 50)[integers(3)], size=2))
        return one if rng.random() < 0.3 else (one, two)

    if name in ("sliding_window", "longformer"):
        options["local_window_size"] = window()
    elif name == "dilated":
        options |= {"local_window_size": window(), "dilation": int(integers(1, 5))}
    elif name == "sparse_transformer":
        options["stride"] = int(integers(1, 24))
    elif name in ("block_sparse", "bigbird", "random"):
        size = options["block_size"] = int((3, 5, 8, 16, 17, 32)[integers(6)])
        if "random_blocks" in options:
            blocks = -(-sizes.keys // size)
            options["random_blocks"] = integers(-1, blocks, size=(blocks, 2)).astype(np.int32)
        if name == "bigbird":
            options["num_window_blocks"] = int((1, 3)[integers(2)])
    elif name == "moba":
        options |= {"block_size": int(integers(1, 20)), "top_k": int(integers(1, 5))}
    elif name == "hierarchical":
        size = int((2, 4, 8, 16)[integers(4)])
        summaries = int(2 ** integers(0, np.log2(size) + 1))
        levels = int(integers(1, 5))
        options |= {"segment_size": size, "num_levels": levels, "num_summaries": summaries}
    elif name == "cosformer":
        options["max_length"] = max(2 * length + 3, 40)  # more than all pieces of decoding
    elif name == "linformer":
        heads = () if rng.random() < 0.5 else (sizes.key_heads,)
        rows = int(integers(1, min(sizes.keys, 8) + 1))
        options |= projections((*heads, rows), sizes.keys + int(integers(0, 3)))
    elif name == "block_linformer":
        heads = () if rng.random() < 0.5 else (sizes.key_heads,)
        slots, size = int(integers(1, 4)), int(integers(3, 20))
        made = projections((*heads, slots), size)
        options |= {name: x.astype(np.float32) for name, x in made.items()}
    elif name == "long_short":
        options = {"window_size": 2 * int(integers(1, 12))}
        slots = int(integers(1, 4))
        if rng.random() < 0.5:
            options["segment_size"] = int(integers(2, 20))
        if rng.random() < 0.5:
            options["projection"] = normal(sizes.size, slots)
        else:
            options["slot_scores"] = normal(sizes.keys, sizes.key_heads, slots)
    elif name == "nystrom":
        options["num_landmarks"] = int(integers(1, min(length, 11) + 1))
        if "skip_kernel" in options:
            width = 2 * int(integers(1, 4)) + 1
            options["skip_kernel"] = normal(sizes.heads, width)
        if sizes.queries != sizes.keys:
            options.pop("skip_kernel", None)
    elif name == "routing":
        options["cluster_size"] = int(integers(2, 6))
    return options


# The values of a case


def draw_known(program: Program, rng: np.random.Generator) -> dict[str, Any]:
    """The arguments without gradient, as NumPy arrays for the reference."""
    sizes, known = program.sizes, {}
    batch, queries, keys, heads = sizes[:4]
    for name, most in (("query_seq_lengths", queries), ("key_value_seq_lengths", keys)):
        if name in program.given:
            known[name] = np.asarray(rng.integers(0, most + 1, size=batch))
            if rng.random() < 0.3:
                known[name] = np.maximum(known[name], most - 1)
    if "segment_ids" in program.given:
        pool = draw_pool(program, rng)
        known["segment_ids"] = tuple(packing(rng, batch, n, pool) for n in (queries, keys))
        if queries == keys and rng.random() < 0.7 or not program.pair:
            known["segment_ids"] = known["segment_ids"][1:] * 2
        if not program.pair:
            known["segment_ids"] = known["segment_ids"][0]
    if "query_offset" in program.given:
        shape = batch if program.broadcast[0] else ()
        signed = program.integers["query_offset"].kind == "i"
        known["query_offset"] = np.asarray(rng.integers(-2 * signed, keys + 1, size=shape))
    if "mask" in program.given:
        shape = broadcast(program, (*batch, 1, queries, keys))
        known["mask"] = rng.random(shape) < 0.8
    if "global_mask" in program.given:
        known["global_mask"] = rng.random((*batch, queries)) < 0.1
    if "dropout_rng" in program.given:
        known["dropout_rng"] = np.asarray([0, rng.integers(2**16)], np.uint32)
    for name, dtype in program.integers.items():
        if name in known:
            known[name] = jax.tree.map(lambda x, d=dtype: np.asarray(x).astype(d), known[name])
    return known


def broadcast(program: Program, shape: tuple[int, ...]) -> tuple[int, ...]:
    ones = program.broadcast[-len(shape) :]
    return tuple(1 if one else n for one, n in zip(ones, shape, strict=True))


def draw_pool(program: Program, rng: np.random.Generator) -> np.ndarray:
    """Distinct ids, the first of which is 0: small ids, or any ids of the dtype."""
    dtype = program.integers["segment_ids"]
    if not program.wild:
        return np.arange(6).astype(dtype)
    # Without x64, JAX has no 64-bit integers, and reads a list of integers as int32.
    narrow = np.dtype(f"{dtype.kind}{min(dtype.itemsize, 4)}")
    if program.container == "list" and narrow == np.uint32:
        narrow = np.dtype(np.uint16)
    limits = np.iinfo(dtype if program.x64 else narrow)
    few = rng.integers(limits.min, limits.max, size=2, dtype=dtype)
    alike = [int(few[0]) + 2**32, 2**32, 2**31, 2**63, -1, 2**16, 2**8, int(few[0]) - 2**32]
    more = [x for x in alike if limits.min <= x <= limits.max]
    ids = {*map(int, few), *(int(x) for x in rng.permutation(np.array(more, object))[:3])} - {0}
    pool = sorted(ids)
    return np.array([0, *rng.permutation(np.array(pool, object))]).astype(dtype)


def packing(rng, batch: tuple[int, ...], length: int, pool: np.ndarray) -> np.ndarray:
    """Ids `(*B, length)` in contiguous runs."""

    def row():
        runs = int(rng.integers(1, min(len(pool), length) + 1))
        borders = np.sort(rng.choice(np.arange(1, length), size=runs - 1, replace=False))
        run = np.searchsorted(borders, np.arange(length), side="right")
        return rng.permutation(pool)[run]

    rows = [row() for _ in range(int(np.prod(batch)))]
    return np.array(rows, pool.dtype).reshape(*batch, length)


def draw_values(program: Program, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Arrays, arguments without gradient, and cotangents, all for one call."""
    subject, sizes = program.subject, program.sizes
    seed = int(rng.integers(2**31))
    arrays = functions.draw_arrays(subject, sizes, True, seed)
    if "bias" in arrays:
        shape = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        arrays["bias"] = rng.normal(size=broadcast(program, shape))
    for name in program.left_out & arrays.keys():
        del arrays[name]
    arrays = functions.to_numpy(subject.case.bounded(arrays))
    arrays = functions.cast(subject, arrays, program.dtype)
    arrays["value"] = arrays["value"].astype(program.value_dtype)
    known = draw_known(program, rng)
    cotangents = functions.cotangents_of(subject, program.extent, arrays, known, seed + 1)
    return arrays, known, cotangents


def draw_case(program: Program, rng: np.random.Generator) -> list[tuple[Any, Any, Any]]:
    """Values of one call, or of each mapped call; mapped calls share all unmapped values."""
    values = [draw_values(program, rng) for _ in range(MAPPED if program.mapped else 1)]
    first = named(values[0])
    for one in values[1:]:
        for group in one[:2]:
            group.update({k: first[k] for k in group if k not in program.mapped})
    if program.mapped and "cotangents" not in program.mapped:
        values = [(*one[:2], values[0][2]) for one in values]
    return values


def with_nan(program: Program, arrays: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """The arrays, with NaN in all tokens that are padding."""
    batch, queries, keys = program.sizes[:3]
    ids = known.get("segment_ids", (np.ones((*batch, queries)), np.ones((*batch, keys))))
    both = ids if isinstance(ids, tuple) else (ids, ids)
    padding = {}
    by_query = {"query", *getattr(program.subject.entry.naive, "per_query", ())}
    for side, length, of_side in zip(("query", "key_value"), (queries, keys), both, strict=True):
        lengths = np.asarray(known.get(f"{side}_seq_lengths", np.full(batch, length)))
        padding[side] = (of_side == 0) | (np.arange(length) >= lengths[..., None])
    arrays = dict(arrays)
    for name in program.subject.of_tokens:
        x = np.array(arrays[name])
        x[padding["query" if name in by_query else "key_value"]] = np.nan
        arrays[name] = x
    return arrays


# Calls.


def as_given(program: Program, known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the container of the call."""

    def convert(name, x):
        if name not in program.integers or program.container == "numpy":
            return x
        return jnp.asarray(x) if program.container == "jax" else x.tolist()

    return {
        name: tuple(convert(name, one) for one in x) if isinstance(x, tuple) else convert(name, x)
        for name, x in known.items()
    }


def run(program: Program, arrays, constants, known, cotangents) -> Any:
    """Results and gradients of the arrays."""

    def call(arrays):
        given = {**known, "implementation": program.implementation}
        return functions.call(program.subject, program.extent, {**arrays, **constants}, given)

    if program.transformation == "forward":
        # A `score_mod` reads `slope` at traced indices, which NumPy arrays do not support.
        arrays = {name: jnp.asarray(x) if name == "slope" else x for name, x in arrays.items()}
        return call(arrays), {}
    if program.transformation == "remat":
        call = jax.checkpoint(call)
    results, pull_back = jax.vjp(call, arrays)
    return results, pull_back(cotangents)[0]


class Runner:
    """A program and its compiled functions."""

    def __init__(self, program: Program):
        self.program = program
        self.jitted = jax.jit(functools.partial(run, program))

    def __str__(self) -> str:
        return str(self.program)

    def may_refuse(self) -> bool:
        """Returns whether the program names an implementation that may refuse the call."""
        return self.program.implementation == "llvm"

    def failures(self, rng: np.random.Generator) -> Iterator[str]:
        """Yields the failures of one case."""
        program = self.program
        with jax.enable_x64(program.x64):
            values = draw_case(program, rng)
            given = values
            # If calls share an array, the padding of one call may be a valid token of another.
            alone = not program.mapped or {*program.subject.of_tokens} <= program.mapped.keys()
            if program.dirty and alone:
                given = [(with_nan(program, *one[:2]), *one[1:]) for one in values]
            found = [functions.to_numpy(result) for result in self.call(given)]
        for results, one in zip(found, values, strict=True):
            yield from differences(program, results, one, rng)

    def call(self, values: list[tuple[Any, Any, Any]]) -> list[Any]:
        """Results and gradients for each call: one call, or all mapped calls."""
        program = self.program
        if program.mapped:
            return self.mapped(values)
        ((arrays, known, cotangents),) = values
        constants = {name: x for name, x in arrays.items() if name in program.constant}
        arrays = {name: x for name, x in arrays.items() if name not in program.constant}
        given = as_given(program, known)
        if program.transformation in ("eager", "forward"):
            return [run(program, arrays, constants, given, cotangents)]
        if program.transformation == "constants":
            of_arrays = jax.jit(lambda *args: run(program, *args[:-1], given, args[-1]))
            return [of_arrays(arrays, constants, cotangents)]
        return [self.jitted(arrays, constants, given, cotangents)]

    def mapped(self, values):
        """vmap or scan over some of the arguments."""
        axes = self.program.mapped
        stacked = {
            name: jax.tree.map(
                lambda *xs, axis=axis: np.moveaxis(np.stack(xs), 0, axis),
                *(named(one)[name] for one in values),
            )
            for name, axis in axes.items()
            if name in named(values[0])
        }
        shared = {name: x for name, x in named(values[0]).items() if name not in stacked}
        results = self.over(stacked, shared)
        return [jax.tree.map(lambda x, j=j: x[j], results) for j in range(len(values))]

    @functools.cached_property
    def over(self):
        program = self.program

        def one(mapped, shared):
            given = {**mapped, **shared}
            cotangents = given.pop("cotangents")
            known = {name: given.pop(name) for name in program.given if name in given}
            return run(program, given, {}, known, cotangents)

        def vmap(stacked, shared):
            axes = {name: program.mapped[name] for name in stacked}
            return jax.vmap(one, in_axes=(axes, None), axis_size=MAPPED)(stacked, shared)

        def scan(stacked, shared):
            def step(carry, mapped):
                return carry, one(mapped, shared)

            return jax.lax.scan(step, None, stacked, length=MAPPED)[1]

        return jax.jit(vmap if program.transformation == "vmap" else scan)


def named(values) -> dict[str, Any]:
    arrays, known, cotangents = values
    return {**arrays, **known, "cotangents": cotangents}


# Comparison with the naive form


def amplification(mechanism: str, options: Mapping[str, Any]) -> float:
    """Factor by which rounding of the sums outweighs rounding of the arguments.

    ReLU features near zero make a small normaliser. Gradients are then differences of numbers as
    large as the inverse of the normaliser, and a change of an argument changes both numbers alike.
    """
    has_relu = mechanism == "cosformer" or options.get("feature_map") == "relu"
    return 8.0 if has_relu else 1.0


def differences(program: Program, ours: Any, values: Any, rng: np.random.Generator):
    """Yields differences between our results and gradients and the naive form in float64."""
    refer = functools.partial(functions.run_naive, program.subject, program.sizes, program.extent)
    arrays, known, cotangents = values

    def in_float64(arrays):
        with jax.enable_x64(True):
            wide = functions.as_float64(arrays), known, functions.as_float64(cotangents)
            return like_ours(functions.to_numpy(refer(*wide)))

    def like_ours(of_naive):
        results, gradients = of_naive
        return {k: results[k] for k in ours[0]}, {k: gradients[k] for k in ours[1]}

    @functools.cache
    def likely():
        """Errors that no bug causes: those of the naive form, and those of rounded arguments."""
        with jax.enable_x64(jnp.float64 in (program.dtype, program.value_dtype)):
            errors = [like_ours(functions.to_numpy(refer(*values)))]
        for _ in range(3):
            errors.append(in_float64(jax.tree.map(functools.partial(jittered, rng), arrays)))
        return [jax.tree.map(largest_difference, error, true) for error in errors]

    true = in_float64(arrays)
    narrowest = max((program.dtype, program.value_dtype), key=lambda d: jnp.finfo(d).eps)
    eps = float(jnp.finfo(narrowest).eps)
    amplified = amplification(program.subject.name, program.subject.options)
    yield from compare(ours, true, likely, eps, program.subject.case.decays, amplified)
