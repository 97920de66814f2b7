"""From the registry to calls: who is tested, on what, with which arguments.

What a mechanism is given follows from the capabilities that it claims. Programs are compiled once
a session for a few sizes; what hypothesis draws (lengths, packing, offsets, values) are arrays.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from effattn import registry
from effattn.arrays import dropout
from tests.marks import slow_but_for
from tests.references import REFERENCES
from tests.references.pairs import Pairs, pairs
from tests.references.reference import Reference

SOFT_CAP = 2.0
DROPOUT_RATE = 0.25


class Subject(NamedTuple):
    """A mechanism with one set of options, by the default implementation or by a named one."""

    name: str
    variant: str
    implementation: str | None = None

    @property
    def entry(self) -> registry.Mechanism:
        return registry.get(self.name)

    @property
    def reference(self) -> Reference:
        return REFERENCES[self.name]

    @property
    def options(self) -> dict[str, Any]:
        options = {**self.entry.options, **self.reference.variants[self.variant]}
        if self.implementation is not None:
            options["implementation"] = self.implementation
        return options

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.entry.function).parameters

    @property
    def of_tokens(self) -> tuple[str, ...]:
        """The arrays of a call whose second axis of `(B, T, ...)` is time."""
        return ("query", "key", "value", *sorted(self.reference.per_token))

    def has(self, capability: str) -> bool:
        return capability in self.entry.capabilities

    def __str__(self) -> str:
        return "-".join(filter(None, self))


# All variants; the first of each mechanism, for every law; the last, for bidirectional calls.
# Those that take no heads are the subjects of `tests.laws.mixers`.
NAMES = [name for name in registry.names() if registry.get(name).takes_heads]
SUBJECTS = [Subject(n, v) for n in NAMES for v in REFERENCES[n].variants]
MECHANISMS = [Subject(n, next(iter(REFERENCES[n].variants))) for n in NAMES]
LAST = [Subject(n, list(REFERENCES[n].variants)[-1]) for n in NAMES]

# Mechanisms of which some float32 calls take kernels for CPUs unless they name an implementation.
# Laws on float32 values are put to the default and to XLA's form of these.
WITH_KERNELS = frozenset(
    {
        "based",
        "cosformer",
        "hedgehog",
        "linear",
        "linformer",
        "long_short",
        "longformer",
        "nystrom",
        "random_features",
        "routing",
        "sliding_window",
        "softmax",
        "sparse_transformer",
    }
)
IN_FLOAT32 = [
    *MECHANISMS,
    *(s._replace(implementation="xla") for s in MECHANISMS if s.name in WITH_KERNELS),
]


def first_of_families(subjects: Sequence[Any]) -> list[Any]:
    """One of each family: what its members share, as the core that they run on, shows in it."""
    return list({subject.entry.family: subject for subject in reversed(subjects)}.values())


FIRST_OF_FAMILY = first_of_families(MECHANISMS)
FIRST_NAMES = [subject.name for subject in FIRST_OF_FAMILY]
# For laws that are not about values alone.
CALLED = slow_but_for(FIRST_OF_FAMILY, MECHANISMS)
CALLED_IN_FLOAT32 = slow_but_for(
    [s for s in IN_FLOAT32 if s.name in (*FIRST_NAMES, *WITH_KERNELS)], IN_FLOAT32
)
# For those that a core answers for: the other families run on those of these two.
WITH_CORES = [s for s in FIRST_OF_FAMILY if s.entry.family in ("exact", "recurrent")]
OF_CORES = slow_but_for(WITH_CORES, MECHANISMS)
OF_CORES_IN_FLOAT32 = slow_but_for(
    [s for s in IN_FLOAT32 if s.name in {core.name for core in WITH_CORES}], IN_FLOAT32
)
# The same two cores under other mechanisms, for what is left: one alone would pay for all.
ALSO_OF_CORES = slow_but_for(
    [s for s in MECHANISMS if s.name in ("sliding_window", "linear")], MECHANISMS
)


class Sizes(NamedTuple):
    """Shapes of a call: batch and lengths, then heads and features.

    Kernels for CPUs take calls of 16 tokens and more.
    """

    batch: tuple[int, ...]
    queries: int
    keys: int
    heads: int = 4
    key_heads: int = 2
    size: int = 6
    value_size: int = 5


SQUARE = Sizes((4,), 17, 17)
CROSS = Sizes((2, 1), 7, 13)


class Extent(NamedTuple):
    """How much of the contract a program uses.

    Attributes:
      is_causal: where the mechanism can be either.
      everything: all that it claims, in place of query, key and value alone.
      simple: leaves out the soft cap, and what depends on absolute positions or on the example's
        index: dropout and most `score_mod`s.
      tuning: the reference's tuning, in place of the defaults.
    """

    is_causal: bool
    everything: bool = False
    simple: bool = True
    tuning: bool = True


def draw_arrays(subject: Subject, sizes: Sizes, everything: bool, seed: int = 0) -> dict[str, Any]:
    """What has gradients, float64: query, key, value, the mechanism's own arguments.

    For everything, also all that is claimed.
    """
    rng = np.random.default_rng(seed)
    batch, queries, keys, heads, key_heads, size, value_size = sizes
    arrays = {
        "query": rng.normal(size=(*batch, queries, heads, size)),
        "key": rng.normal(size=(*batch, keys, key_heads, size)),
        "value": rng.normal(size=(*batch, keys, key_heads, value_size)),
        **subject.reference.arguments(rng, sizes),
    }
    if not everything:
        return arrays
    if "scale" in subject.parameters:
        arrays["scale"] = np.asarray(0.7)
    if subject.has("bias"):
        arrays["bias"] = rng.normal(size=(heads, queries, keys))
    if subject.has("score_mod"):
        arrays["slope"] = rng.normal(size=heads) / 5
    if subject.has("sink"):
        arrays["sink"] = rng.normal(size=heads)
    if subject.has("state"):
        shapes = state_shapes(subject, sizes)
        draw = subject.reference.initial_state or uniform_state
        arrays["initial_state"] = draw(rng, shapes)
    return arrays


def uniform_state(rng: np.random.Generator, shapes: Any) -> Any:
    return jax.tree.map(lambda x: rng.uniform(0.1, 1, size=x.shape), shapes)


@functools.cache
def state_shapes(subject: Subject, sizes: Sizes) -> Any:
    """What the contract leaves to the mechanism: the pytree of the state, and its shapes."""
    extent = Extent(is_causal=not subject.has("bidirectional"))
    arrays = {
        k: jax.ShapeDtypeStruct(x.shape, jnp.float32)
        for k, x in draw_arrays(subject, sizes, everything=False).items()
    }
    return jax.eval_shape(lambda a: call(subject, extent, a, {}), arrays)["state"]


@functools.cache
def empty_state(subject: Subject, sizes: Sizes, dtype: Any) -> Any:
    """The state before the first token, as its decoder makes it, for tokens of a dtype."""
    (rows,), _, _, _, key_heads, size, value_size = sizes
    arrays = cast(subject, draw_arrays(subject, sizes, everything=False), dtype)
    tokens = {k: arrays[k][:, :1] for k in subject.reference.per_token}
    decoder = decoder_of(subject, arrays)
    state = decoder.init(rows, 1, key_heads, size, value_size, dtype, **tokens)
    return to_numpy(state.state)


def decoder_of(subject: Subject, arrays: Mapping[str, Any]) -> Any:
    """The mechanism's decoder, with those of its own arguments that all tokens share."""
    shared = {k: x for k, x in arrays.items() if k not in subject.of_tokens}
    options = {**subject.options, **subject.reference.tuning, **shared}
    return registry.load(subject.entry.decoder)(subject.entry.function, options)


@st.composite
def draw_sizes(draw, subject: Subject, extent: Extent) -> Sizes:
    """Any that fit the subject's options: where these hold arrays, `SQUARE` but for the batch."""
    batch = draw(st.sampled_from([(), (3,), (1,), (2, 1), (1, 2, 2)]))
    if any(np.ndim(option) for option in subject.options.values() if hasattr(option, "shape")):
        return SQUARE._replace(batch=batch)
    least = max(subject.reference.least_tokens, subject.options.get("cluster_size", 2))
    lengths = st.integers(least, subject.options.get("max_length", 40))
    queries = draw(lengths)
    keys = draw(lengths) if subject.has("cross") and not extent.is_causal else queries
    key_heads = draw(st.integers(1, 3))
    heads = key_heads * (draw(st.integers(1, 3)) if subject.has("grouped") else 1)
    return Sizes(batch, queries, keys, heads, key_heads, *(draw(st.integers(1, 9)) for _ in "qv"))


@st.composite
def draw_known(draw, subject: Subject, sizes: Sizes, extent: Extent) -> dict[str, Any]:
    """What has no gradient: lengths, packing, offsets, masks, the key of the dropout."""
    batch, queries, keys, heads = sizes[:4]
    rows = int(np.prod(batch))
    known: dict[str, Any] = {}

    def of_rows(strategy):
        drawn = draw(st.lists(strategy, min_size=rows, max_size=rows))
        return np.asarray(drawn, np.int32).reshape((*batch, *np.shape(drawn[0])))

    if subject.has("lengths"):
        known["query_seq_lengths"] = of_rows(st.integers(0, queries))
        known["key_value_seq_lengths"] = of_rows(st.integers(0, keys))
    if subject.has("segments") and takes_segments(subject, extent):
        known["segment_ids"] = of_rows(packings(keys))
        if queries != keys:
            known["segment_ids"] = (of_rows(packings(queries)), known["segment_ids"])
    if subject.has("offset"):
        offsets = st.integers(-2, keys)
        offset = draw(offsets) if queries != keys else of_rows(offsets)
        known["query_offset"] = np.asarray(offset, np.int32)
    seed = draw(st.integers(0, 2**16))
    if subject.has("mask"):
        mask = np.random.default_rng(seed).random((*batch, 1, queries, keys)) < 0.8
        known["mask"] = mask
    if "global_mask" in subject.parameters:
        known["global_mask"] = np.random.default_rng(seed).random((*batch, queries)) < 0.2
    if subject.has("dropout") and extent.everything and not extent.simple:
        known["dropout_rng"] = np.asarray([0, seed], np.uint32)
    return known


def takes_segments(subject: Subject, extent: Extent) -> bool:
    with_state = subject.has("state") and not subject.reference.state_and_segments
    return extent.is_causal or not with_state


@st.composite
def packings(draw, length: int) -> list[int]:
    """Ids of one row: contiguous runs, of which those of 0 are padding."""
    borders = sorted(draw(st.sets(st.integers(1, length - 1), max_size=4)))
    ids = draw(st.permutations(range(len(borders) + 1)))
    return [ids[np.searchsorted(borders, t, side="right")] for t in range(length)]


def neutral(subject: Subject, sizes: Sizes, extent: Extent) -> dict[str, Any]:
    """What a program for everything takes, where nothing is padded, packed, moved or masked."""
    batch, queries, keys, _ = sizes[:4]
    known: dict[str, Any] = {}
    if subject.has("lengths"):
        known["query_seq_lengths"] = np.full(batch, queries, np.int32)
        known["key_value_seq_lengths"] = np.full(batch, keys, np.int32)
    if subject.has("segments") and takes_segments(subject, extent):
        known["segment_ids"] = np.ones((*batch, keys), np.int32)
    if subject.has("offset"):
        known["query_offset"] = np.zeros(batch, np.int32)
    if subject.has("mask"):
        known["mask"] = np.ones((*batch, 1, queries, keys), bool)
    if "global_mask" in subject.parameters:
        known["global_mask"] = np.zeros((*batch, queries), bool)
    return known


def score_mod_of(arrays: Mapping[str, Any], simple: bool):
    def score_mod(logit, b, h, i, j):
        logit = logit - arrays["slope"][h] * jnp.abs(i - j).astype(logit.dtype)
        return logit if simple else logit * (1 + ((b + 2 * i + 3 * j) % 5).astype(float) / 8)

    return score_mod


def fixed_options(subject: Subject, extent: Extent, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are neither arrays of the caller nor drawn."""
    options = subject.options
    if "is_causal" in subject.parameters:
        options["is_causal"] = extent.is_causal
    if extent.everything:
        if subject.has("window") and "local_window_size" not in options:
            options["local_window_size"] = (9, 6)
        if subject.has("soft_cap") and not extent.simple:
            options["logits_soft_cap"] = SOFT_CAP
        if subject.has("score_mod"):
            options["score_mod"] = score_mod_of(arrays, extent.simple)
        if subject.has("dropout") and not extent.simple:
            options["dropout_rate"] = DROPOUT_RATE
    return options


def call(
    subject: Subject, extent: Extent, arrays: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    """The mechanism's results by name: "out" and, where claimed, "lse" and "state"."""
    keywords = fixed_options(subject, extent, arrays)
    keywords.update({k: v for k, v in arrays.items() if k != "slope"}, **known)
    if "global_mask" in known:
        keywords["max_global"] = known["global_mask"].shape[-1]
    if "dropout_rng" in known:
        keywords["dropout_rng"] = jax.random.wrap_key_data(known["dropout_rng"])
    if extent.tuning:
        keywords.update(subject.reference.tuning)
    second = second_result(subject, extent, known)
    if second is not None:
        keywords["return_residual" if second == "lse" else "return_state"] = True
    results = subject.entry.function(**keywords)
    return {"out": results} if second is None else {"out": results[0], second: results[1]}


def refer(
    subject: Subject, extent: Extent, arrays: Mapping[str, Any], pairs: Pairs, keep: Any
) -> dict[str, Any]:
    """The reference's results for the same call."""
    options = fixed_options(subject, extent, arrays)
    return subject.reference.attend(arrays, pairs, keep, **options)


def pairs_of(subject: Subject, sizes: Sizes, extent: Extent, known: Mapping[str, Any]) -> Pairs:
    options = fixed_options(subject, extent, {"slope": None})
    shape = {k: options[k] for k in ("local_window_size", "dilation") if k in options}
    given = {k: v for k, v in known.items() if k not in ("mask", "dropout_rng")}
    if "mask" in known:
        given["mask"] = known["mask"][..., 0, :, :]
    return pairs(
        sizes.batch, sizes.queries, sizes.keys, is_causal=extent.is_causal, **shape, **given
    )


def keep_of(subject: Subject, sizes: Sizes, dropout_rng: Any, position: Any) -> Any:
    """bool `(*B, N, T, S)`, what dropout keeps; None where there is none."""
    if dropout_rng is None:
        return None
    keys = sizes.keys + subject.reference.more_keys
    seed = dropout.seed_from_rng(jax.random.wrap_key_data(dropout_rng))
    b = jnp.arange(math.prod(sizes.batch)).reshape(*sizes.batch, 1, 1, 1)
    h, i, j = jnp.arange(sizes.heads), position[..., None, :, None], jnp.arange(keys)
    return dropout.keep(seed, DROPOUT_RATE, b, h[:, None, None], i, j)


@functools.cache
def traced_once(subject: Subject, extent: Extent):
    """`(arrays, known, cotangents) -> (results, gradients of arrays)`.

    Whoever calls it, by itself or within a larger program, arguments of the same shapes are traced
    once.
    """

    def run(arrays, known, cotangents):
        # Whoever forbids it to their own arrays can call all of them.
        with jax.numpy_rank_promotion("raise"):
            results, pull_back = jax.vjp(lambda a: call(subject, extent, a, known), arrays)
            return results, pull_back(cotangents)[0]

    return jax.jit(run)


@functools.cache
def program(subject: Subject, extent: Extent):
    """The same, as a program of its own."""
    return jax.jit(traced_once(subject, extent))


@functools.cache
def _reference_program(subject: Subject, sizes: Sizes, extent: Extent):
    def run(arrays, pairs, dropout_rng, cotangents):
        keep = keep_of(subject, sizes, dropout_rng, pairs.position)
        results, pull_back = jax.vjp(lambda a: refer(subject, extent, a, pairs, keep), arrays)
        rest = {name: x for name, x in results.items() if name not in cotangents}
        rest = jax.tree.map(jnp.zeros_like, rest)
        results = {name: results[name] for name in cotangents}
        return results, pull_back({**cotangents, **rest})[0]

    return jax.jit(run)


def run_reference(
    subject: Subject,
    sizes: Sizes,
    extent: Extent,
    arrays,
    known,
    cotangents,
    of_pairs: Extent | None = None,
):
    """The reference's results and gradients, in the dtype of the arrays.

    One compiled reference does for all calls that differ in their pairs alone; `of_pairs` says
    where these come from another extent.
    """
    pairs = pairs_of(subject, sizes, of_pairs or extent, known)
    # What the subject has nothing of makes no other program.
    simple = extent.simple or not any(map(subject.has, ("score_mod", "soft_cap", "dropout")))
    alike = extent._replace(is_causal=False, tuning=False, simple=simple)
    run = _reference_program(subject, sizes, alike)
    return run(arrays, pairs, known.get("dropout_rng"), cotangents)


def cotangents_of(subject: Subject, extent: Extent, arrays, known, seed: int = 1) -> Any:
    """Random cotangents for the results of a call, in the shapes and dtypes of the contract."""
    query, key, value = (arrays[k] for k in ("query", "key", "value"))
    wide = functools.reduce(jnp.promote_types, (query.dtype, value.dtype, jnp.float32))
    of = jax.ShapeDtypeStruct
    results = {"out": of((*query.shape[:-1], value.shape[-1]), value.dtype)}
    second = second_result(subject, extent, known)
    if second == "lse":
        results["lse"] = of(query.shape[:-1], wide)
    elif second == "state":
        *batch, queries, heads, size = query.shape
        sizes = Sizes(tuple(batch), queries, key.shape[-3], heads, key.shape[-2], size)
        shapes = state_shapes(subject, sizes._replace(value_size=value.shape[-1]))
        results["state"] = jax.tree.map(lambda x: of(x.shape, wide), shapes)
    rng = np.random.default_rng(seed)
    # Leaves come in the order of their names.
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), results)


def second_result(subject: Subject, extent: Extent, known: Mapping[str, Any]) -> str | None:
    """What the call returns besides its output: the log-sum-exp, the state or nothing."""
    if subject.has("residual"):
        return "lse"
    with_state = "segment_ids" not in known or takes_segments(subject, extent)
    return "state" if subject.has("state") and with_state else None


def cast(subject: Subject, arrays: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The arrays in a dtype; learned numbers, decays and states at least float32, as in use.

    So per token is in the dtype of the tokens all that a model projects from them, gates and the
    strengths of updates too, but for the decays, whose sums over tokens are taken.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    narrow = {"bias", *subject.of_tokens} - subject.reference.decays
    return {
        k: jax.tree.map(lambda x, to=dtype if k in narrow else wide: x.astype(to), v)
        for k, v in arrays.items()
    }


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def as_float64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def assert_close(ours, expected, rtol: float) -> None:
    """Equal to `rtol` of each array's largest entry, infinities in the same places."""
    for (path, a), b in zip(
        jax.tree.leaves_with_path(to_numpy(ours)), jax.tree.leaves(to_numpy(expected)), strict=True
    ):
        size = np.abs(b[np.isfinite(b)]).max(initial=1)
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * size, err_msg=jax.tree_util.keystr(path)
        )


# Two programs that most laws share: query, key and value alone in float32, and all that is claimed
# in float64. Both are causal where the mechanism can be.


def draw_plain(subject: Subject, seed: int) -> dict[str, np.ndarray]:
    return cast(subject, draw_arrays(subject, SQUARE, everything=False, seed=seed), jnp.float32)


def plain(subject: Subject) -> Extent:
    # Kernels have tiles of their own: a call that names tiles is XLA's.
    by_kernel = subject.implementation is None and subject.name in WITH_KERNELS
    return Extent(is_causal=subject.has("causal"), tuning=not by_kernel)


def run(subject: Subject, arrays: Mapping[str, Any], cotangents: Any = None) -> Any:
    """Results and gradients of the plain program, as NumPy arrays.

    With float64 enabled, where float32 has to stay what it is. The other laws' programs are not.
    """
    if cotangents is None:
        cotangents = plain_cotangents(subject)
    with jax.enable_x64(True):
        return to_numpy(program(subject, plain(subject))(arrays, {}, cotangents))


@functools.cache
def plain_cotangents(subject: Subject) -> Any:
    return cotangents_of(subject, plain(subject), draw_plain(subject, 0), {})


def everything(subject: Subject) -> Extent:
    return Extent(is_causal=subject.has("causal"), everything=True)


def run_everything(subject: Subject, arrays: Mapping[str, Any], known, cotangents) -> Any:
    """Results and gradients of the program for all that is claimed, as NumPy arrays."""
    run = program(subject, everything(subject))
    return to_numpy(run(arrays, known, cotangents))
