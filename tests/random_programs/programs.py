"""Random programs: a function of query, key and value with sizes, options and a way to call it."""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.testing import Case, functions
from effattn.testing.functions import Extent, Sizes
from tests.arguments import projections
from tests.cases import FUNCTIONS

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


def draw_program(rng: np.random.Generator, only: re.Pattern[str]) -> Program | None:
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
    return Program(
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
