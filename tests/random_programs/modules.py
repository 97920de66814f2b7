"""Random calls of modules in float64 or float32, against naive forms or against themselves.

A mechanism without heads has a naive form of its module. The function of a mechanism with heads is
compared in `calls`; here the module's own whole sequences in float64 are the reference for float32,
for packed documents, and for decoding in pieces.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn import registry
from effattn.nn import RotaryEmbedding
from effattn.testing.functions import Sizes
from tests.cases import FUNCTIONS, MIXERS
from tests.random_programs.calls import amplification
from tests.random_programs.errors import compare, jittered, largest_difference
from tests.random_programs.programs import INTEGERS, STATES, draw_length, draw_options

FEATURES = 8
HEADS = ((2, 2), (2, 1), (4, 2), (1, 1))  # query heads and key heads
PIECES = (1, 2, 3, 5, 8, 15, 16, 17, 33)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that defines a call except its values.

    Attributes:
      documents: the lengths of the documents of each row; padding follows the last document.
      given: which of "lengths" and "segment_ids" are given.
      pieces: numbers of tokens of the pieces of decoding; empty for whole sequences.
      unequal: whether each row of a decoding call may read fewer tokens than the piece has.
    """

    name: str
    options: Mapping[str, Any]
    is_causal: bool
    heads: tuple[int, int]
    rotary: bool
    length: int
    documents: tuple[tuple[int, ...], ...]
    given: frozenset[str]
    integers: np.dtype
    dtype: Any
    x64: bool
    eager: bool
    pieces: tuple[int, ...]
    unequal: bool

    def __str__(self) -> str:
        options = {k: v for k, v in self.options.items() if np.ndim(v) < 2}
        direction = "causal" if self.is_causal else "bidirectional"
        words = [
            f"module of {self.name} {direction} {options} heads {self.heads}",
            f"rotary={self.rotary} T {self.length} documents {self.documents}",
            f"{jnp.dtype(self.dtype).name}{' x64' if self.x64 else ''}",
            "eager" if self.eager else "jit",
        ]
        if self.given:
            words.append(f"given {sorted(self.given)} {self.integers}")
        if self.pieces:
            words.append(f"pieces {self.pieces}{' unequal' if self.unequal else ''}")
        return "; ".join(words)


def draw(rng: np.random.Generator, only: re.Pattern[str]) -> "Runner | None":
    """A program, or None if the drawn mechanism does not match `only`."""
    names = registry.names()
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
    decodes = is_causal and "decode" in entry.capabilities and coin()
    length = max(draw_length(rng), 5)
    if name in STATES:
        length = min(length, 65)
    rows = int(rng.integers(1, 4))
    given = {g for g in ("lengths", "segments") if g in entry.capabilities and coin(0.7)}
    # A document alone needs as many tokens as there are clusters.
    least = 5 if name == "routing" else 1
    if length < 2 * least:
        given.discard("segments")
    if decodes:
        given, documents = set(), ((length,),) * rows
    elif "segments" in given:
        one = int(rng.integers(least, length - least + 1))
        two = int(rng.integers(least - 1, length - one + 1)) // least * least
        both = tuple(size for size in (one, two) if size)
        documents = tuple(both[::-1] if coin() else both for _ in range(rows))
    elif "lengths" in given:
        sizes = (length, int(rng.integers(1, length + 1)))
        documents = tuple((one_of(sizes),) for _ in range(rows))
    else:
        documents = ((length,),) * rows
    heads = one_of(HEADS)
    if "grouped" not in entry.capabilities:
        heads = (heads[0], heads[0])
    x64 = coin()
    dtype = jnp.float64 if x64 and coin(0.2) else jnp.float32
    if name == "routing":
        # Rounding of the projections may decide which of two near tokens a cluster takes.
        x64, dtype = True, jnp.float64
    wide_enough = [d for d in INTEGERS if np.iinfo(d).max >= length]
    program = Program(
        name=name,
        options=options_of(rng, entry, length, heads, is_causal),
        is_causal=is_causal,
        heads=heads,
        rotary=coin(),
        length=length,
        documents=documents,
        given=frozenset(given),
        integers=one_of([np.dtype(np.int32), *wide_enough]),
        dtype=dtype,
        x64=x64,
        eager=coin(0.2),
        pieces=tuple(one_of(PIECES) for _ in range(2)) if decodes else (),
        unequal=coin(),
    )
    return Runner(program)


def options_of(rng, entry, length: int, heads: tuple[int, int], is_causal: bool) -> dict[str, Any]:
    if entry.name in MIXERS:
        variants = list(MIXERS[entry.name].variants.values())
        options = dict(variants[rng.integers(len(variants))])
        if "max_length" in options:
            options["max_length"] = length + int(rng.integers(0, 4))
        return options
    if entry.name == "linformer":
        return {"max_length": length + int(rng.integers(0, 4)), "num_projected": min(length, 4)}
    if entry.name in ("random", "bigbird"):
        options = {"block_size": max(1, length // 8)}
        return options | (dict(FUNCTIONS[entry.name].decoding) if is_causal else {})
    if FUNCTIONS[entry.name].module is not None:
        return dict(FUNCTIONS[entry.name].module)
    sizes = Sizes((2,), length, length, heads[0], heads[1], FEATURES // heads[0], 1)
    chosen = draw_options(rng, entry.name, sizes)
    if is_causal:
        chosen |= FUNCTIONS[entry.name].decoding
    return {
        name: option
        for name, option in chosen.items()
        if option is not entry.options.get(name) and not isinstance(option, np.ndarray)
    }


class Runner:
    """A program with its module and compiled functions."""

    def __init__(self, program: Program):
        self.program = program
        self.entry = registry.get(program.name)

    def __str__(self) -> str:
        return str(self.program)

    def may_refuse(self) -> bool:
        """Returns False, because modules name no implementation."""
        return False

    @functools.cached_property
    def module(self) -> Any:
        """The module in float64, with random changes of the initial parameters."""
        program, entry, rng = self.program, self.entry, np.random.default_rng(0)

        def build():
            options = dict(program.options)
            if entry.takes_heads:
                options |= {"num_kv_heads": program.heads[1]}
                if program.rotary and not FEATURES // program.heads[0] % 2:
                    options |= entry.options_of_model({"rotary": RotaryEmbedding()})
            return entry.build(
                FEATURES,
                program.heads[0],
                is_causal=program.is_causal,
                rngs=nnx.Rngs(0),
                **options,
            )

        def moved(x):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return np.asarray(x, np.float64) + rng.normal(size=x.shape) / 8

        return jax.tree.map(moved, jax.jit(build)())

    def cast(self, dtype: Any) -> Any:
        """The module with its parameters in a dtype."""

        def cast(x):
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(cast, self.module)

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """Valid tokens, bool `(B, T, 1)`."""
        lengths = np.array([sum(row) for row in self.program.documents])
        return (np.arange(self.program.length) < lengths[:, None])[..., None]

    @functools.cached_property
    def padding(self) -> dict[str, np.ndarray]:
        program, given = self.program, {}
        if "lengths" in program.given:
            given["lengths"] = np.array([sum(row) for row in program.documents])
        if "segments" in program.given:
            given["segment_ids"] = np.zeros((len(program.documents), program.length), int)
            for ids, row in zip(given["segment_ids"], program.documents, strict=True):
                ids[: sum(row)] = np.repeat(np.arange(len(row)) + 1, row)
        return {name: x.astype(program.integers) for name, x in given.items()}

    def failures(self, rng: np.random.Generator) -> Iterator[str]:
        """Yields the failures of the case that these random numbers give."""
        program = self.program
        shape = (len(program.documents), program.length, FEATURES)
        x = rng.normal(size=shape).astype(program.dtype)
        cotangent = (rng.normal(size=shape) * self.valid).astype(program.dtype)
        with jax.enable_x64(program.x64):
            module = self.cast(program.dtype)
            if program.pieces:
                order, found = self.decode(module, x, rng)
            else:
                found = self.whole(module, np.where(self.valid, x, np.nan), cotangent)
        found = jax.tree.map(np.asarray, found)

        def truth(dtype, of=lambda a: a):
            with jax.enable_x64(dtype == np.float64):
                module = jax.tree.map(of, self.cast(program.dtype))
                tree = jax.tree.map(np.asarray, (module, of(x), of(cotangent)))
                results = self.plain(*jax.tree.map(as_float(dtype), tree))
            results = jax.tree.map(np.asarray, results)
            return results[0][order] if program.pieces else results

        @functools.cache
        def likely():
            jitters = [truth(np.float64, functools.partial(jitter, rng)) for _ in range(3)]
            errors = [truth(program.dtype), *jitters]
            return [jax.tree.map(largest_difference, error, true) for error in errors]

        true = truth(np.float64)
        eps = float(jnp.finfo(program.dtype).eps)
        yield from compare(
            found, true, likely, eps, amplified=amplification(program.name, program.options)
        )

    @functools.cached_property
    def whole(self):
        """Outputs, and the gradients of the parameters and the tokens."""

        def run(module, x, cotangent, padding):
            return both(lambda m, x: m(x, **padding), module, x, cotangent, self.valid)

        run = run if self.program.eager else jax.jit(run)
        return functools.partial(run, padding=self.padding)

    @functools.cached_property
    def plain(self):
        """The reference for `whole`, where possible of each document alone."""
        program, places = self.program, {}
        for row, sizes in enumerate(program.documents):
            for start, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
                places.setdefault(size, []).append((row, start))

        def documents(module, x):
            if self.entry.takes_heads and "segments" not in program.given:
                return module(x, **self.padding)
            y = jnp.zeros_like(x)
            for size, where in places.items():
                rows, starts = np.array(where).T[..., None]
                at = rows, starts + np.arange(size)
                if self.entry.takes_heads:
                    mixed = module(x[at])
                else:
                    mix = MIXERS[program.name].mix or self.entry.naive
                    mixed = jax.vmap(functools.partial(mix, module))(x[at])
                y = y.at[at].set(mixed)
            return y

        return jax.jit(
            lambda module, x, cotangent: both(documents, module, x, cotangent, self.valid)
        )

    def decode(self, module, x, rng) -> tuple[np.ndarray, np.ndarray]:
        """Source row of each final row, and the outputs of all tokens, decoded in pieces."""
        program = self.program
        rows, length = x.shape[:2]
        state = module.init_state(rows, length, x.dtype)
        order, out, at = np.arange(rows), np.zeros(x.shape, x.dtype), np.zeros(rows, int)
        while (at < length).any():
            piece = program.pieces[rng.integers(len(program.pieces))]
            if program.unequal:
                lengths = np.minimum(rng.integers(0, piece + 1, size=rows), length - at)
            elif (at + piece > length).any():
                piece, lengths = 1, np.ones(rows, int)
            else:
                lengths = np.full(rows, piece)
            tokens = np.full((rows, piece, FEATURES), np.nan, x.dtype)
            for row, (start, size) in enumerate(zip(at, lengths, strict=True)):
                tokens[row, :size] = x[order[row], start : start + size]
            of_rows = lengths.astype(program.integers) if program.unequal else None
            y, state = self.extend(module, tokens, state, of_rows)
            for row, (start, size) in enumerate(zip(at, lengths, strict=True)):
                out[row, start : start + size] = y[row, :size]
            at = at + lengths
            if rng.random() < 0.1:  # as beam search reorders rows
                chosen = rng.integers(rows, size=rows)
                state = jax.tree.map(lambda leaf, rows=chosen: leaf[rows], state)
                order, out, at = order[chosen], out[chosen], at[chosen]
        return order, out

    @functools.cached_property
    def extend(self):
        def extend(module, tokens, state, lengths):
            return module.extend(tokens, state, lengths=lengths)

        return extend if self.program.eager else jax.jit(extend)


def both(call, module, x, cotangent, valid):
    """Outputs, zero in padding, and the gradients of floating-point parameters and of tokens."""
    leaves, structure = jax.tree.flatten(module)
    learned = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def of(parameters, x):
        given = dict(zip(learned, parameters, strict=True))
        module = jax.tree.unflatten(structure, [given.get(n, x) for n, x in enumerate(leaves)])
        return jnp.where(valid, call(module, x), 0)

    y, pull_back = jax.vjp(of, [leaves[n] for n in learned], x)
    return y, *pull_back(cotangent)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def as_float(dtype):
    return lambda x: np.asarray(x).astype(dtype) if is_float(x) else x


def jitter(rng, x):
    return jittered(rng, x) if is_float(x) else x
