"""Calls of mechanisms with heads: random inputs, and programs of the fast and the naive form.

The arguments of a call follow from the capabilities of the mechanism. Programs are compiled once
for a few shapes; lengths, packing, offsets and values are arrays that `hypothesis` draws.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from effattn import registry
from effattn.testing.case import Case

SOFT_CAP = 2.0
DROPOUT_RATE = 0.25


class Subject(NamedTuple):
    """A mechanism with one set of options, by the default implementation or by a named one."""

    name: str
    variant: str
    case: Case
    implementation: str | None = None
    # True if float32 calls name tiles or chunks; kernels have tiles of their own.
    tuned: bool = True

    @property
    def entry(self) -> registry.Mechanism:
        """The registry entry."""
        return registry.get(self.name)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the variant over the registered defaults."""
        options = {**self.entry.options, **self.case.variants[self.variant]}
        if self.implementation is not None:
            options["implementation"] = self.implementation
        return options

    @property
    def least_tokens(self) -> int:
        """The least number of tokens that the options allow."""
        least = self.case.least_tokens
        return least if isinstance(least, int) else least[self.variant]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function."""
        assert self.entry.function is not None
        return inspect.signature(self.entry.function).parameters

    @property
    def per_token(self) -> tuple[str, ...]:
        """Own arrays `(B, T, K, ...)`."""
        return self._own("per_token")

    @property
    def per_head(self) -> tuple[str, ...]:
        """Own arrays `(K, ...)` or `(N, ...)`."""
        return self._own("per_head")

    @property
    def of_tokens(self) -> tuple[str, ...]:
        """The arrays of a call whose second axis of `(B, T, ...)` is time."""
        return ("query", "key", "value", *self.per_token)

    def _own(self, kind: str) -> tuple[str, ...]:
        drawn = self.case.own(self.variant, np.random.default_rng(0), SQUARE)
        return tuple(sorted(drawn.keys() & {*getattr(self.entry.naive, kind, ())}))

    def has(self, capability: str) -> bool:
        """Returns whether the mechanism claims a capability."""
        return capability in self.entry.capabilities

    def __str__(self) -> str:
        return "-".join(filter(None, (self.name, self.variant, self.implementation)))


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
      is_causal: direction, for mechanisms that have both.
      everything: all claimed options, without those that `simple` leaves out; with False, query,
        key, value and own arguments alone.
      simple: no soft cap, no dropout, and a `score_mod` of the distance alone.
      tuning: the tuning of the `Case`; with False, the defaults.
    """

    is_causal: bool
    everything: bool = False
    simple: bool = True
    tuning: bool = True


def draw_arrays(subject: Subject, sizes: Sizes, everything: bool, seed: int = 0) -> dict[str, Any]:
    """Arrays with gradients, float64: query, key, value and own arguments.

    With `everything` also the arrays of all claimed options.
    """
    rng = np.random.default_rng(seed)
    batch, queries, keys, heads, key_heads, size, value_size = sizes
    arrays = {
        "query": rng.normal(size=(*batch, queries, heads, size)),
        "key": rng.normal(size=(*batch, keys, key_heads, size)),
        "value": rng.normal(size=(*batch, keys, key_heads, value_size)),
        **subject.case.own(subject.variant, rng, sizes),
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
        draw = subject.case.initial_state or uniform_state
        arrays["initial_state"] = draw(rng, shapes)
    return arrays


def uniform_state(rng: np.random.Generator, shapes: Any) -> Any:
    """A random state of these shapes, uniform in [0.1, 1)."""
    return jax.tree.map(lambda x: rng.uniform(0.1, 1, size=x.shape), shapes)


@functools.cache
def state_shapes(subject: Subject, sizes: Sizes) -> Any:
    """Shapes of the mechanism's state."""
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
    tokens = {k: arrays[k][:, :1] for k in subject.per_token}
    decoder = decoder_of(subject, arrays)
    state = decoder.init(rows, 1, key_heads, size, value_size, dtype, **tokens)
    return to_numpy(state.state)


def decoder_of(subject: Subject, arrays: Mapping[str, Any]) -> Any:
    """The mechanism's decoder, with the own arguments that all tokens share."""
    shared = {k: x for k, x in arrays.items() if k not in subject.of_tokens}
    options = {**subject.options, **subject.case.tuning, **shared}
    assert subject.entry.decoder is not None
    return registry.load(subject.entry.decoder)(subject.entry.function, options)


@st.composite
def draw_sizes(draw, subject: Subject, extent: Extent) -> Sizes:
    """Shapes that fit the options; `SQUARE` but for the batch if the options hold arrays."""
    batch = draw(st.sampled_from([(), (3,), (1,), (2, 1), (1, 2, 2)]))
    if any(np.ndim(option) for option in subject.options.values() if hasattr(option, "shape")):
        return SQUARE._replace(batch=batch)
    least = max(subject.least_tokens, subject.options.get("cluster_size", 2))
    lengths = st.integers(least, subject.options.get("max_length", 40))
    queries = draw(lengths)
    keys = draw(lengths) if subject.has("cross") and not extent.is_causal else queries
    key_heads = draw(st.integers(1, 3))
    heads = key_heads * (draw(st.integers(1, 3)) if subject.has("grouped") else 1)
    return Sizes(batch, queries, keys, heads, key_heads, *(draw(st.integers(1, 9)) for _ in "qv"))


@st.composite
def draw_known(draw, subject: Subject, sizes: Sizes, extent: Extent) -> dict[str, Any]:
    """Arguments without gradients: lengths, packing, offsets, masks, the dropout key."""
    batch, queries, keys, heads = sizes[:4]
    rows = int(np.prod(batch))
    known: dict[str, Any] = {}

    def of_rows(strategy):
        drawn = draw(st.lists(strategy, min_size=rows, max_size=rows))
        return np.asarray(drawn, np.int32).reshape((*batch, *np.shape(drawn[0])))

    if subject.has("lengths"):
        known["query_seq_lengths"] = of_rows(st.integers(0, queries))
        known["key_value_seq_lengths"] = of_rows(st.integers(0, keys))
    if subject.has("segments") and takes_segments(subject, extent, queries == keys):
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
    for name in subject.case.masks:
        known[name] = np.random.default_rng(seed).random((*batch, queries)) < 0.2
    if subject.has("dropout") and extent.everything and not extent.simple:
        known["dropout_rng"] = np.asarray([0, seed], np.uint32)
    return known


def takes_segments(subject: Subject, extent: Extent, is_self: bool = True) -> bool:
    """Returns whether `segment_ids` go with the other options of an extent."""
    with_state = subject.has("state") and not subject.case.state_and_segments
    if not (is_self or subject.case.cross_and_segments):
        return False
    return extent.is_causal or not with_state


@st.composite
def packings(draw, length: int) -> list[int]:
    """Segment ids of one row: contiguous runs; id 0 is padding."""
    borders = sorted(draw(st.sets(st.integers(1, length - 1), max_size=4)))
    ids = draw(st.permutations(range(len(borders) + 1)))
    return [ids[np.searchsorted(borders, t, side="right")] for t in range(length)]


def neutral(subject: Subject, sizes: Sizes, extent: Extent) -> dict[str, Any]:
    """Arguments without gradients that pad, pack, move and mask nothing."""
    batch, queries, keys, _ = sizes[:4]
    known: dict[str, Any] = {}
    if subject.has("lengths"):
        known["query_seq_lengths"] = np.full(batch, queries, np.int32)
        known["key_value_seq_lengths"] = np.full(batch, keys, np.int32)
    if subject.has("segments") and takes_segments(subject, extent, queries == keys):
        ids = (np.ones((*batch, length), np.int32) for length in (queries, keys))
        known["segment_ids"] = next(ids) if queries == keys else tuple(ids)
    if subject.has("offset"):
        known["query_offset"] = np.zeros(batch, np.int32)
    if subject.has("mask"):
        known["mask"] = np.ones((*batch, 1, queries, keys), bool)
    for name in subject.case.masks:
        known[name] = np.zeros((*batch, queries), bool)
    return known


def score_mod_of(arrays: Mapping[str, Any], simple: bool):
    """A `score_mod` with a learned slope a head; if not simple, it depends on every index."""

    def score_mod(logit, b, h, i, j):
        slope = arrays["slope"][h].astype(logit.dtype)
        logit = logit - slope * jnp.abs(i - j).astype(logit.dtype)
        return logit if simple else logit * (1 + ((b + 2 * i + 3 * j) % 5).astype(float) / 8)

    return score_mod


def fixed_options(subject: Subject, extent: Extent, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are neither arrays with gradients nor drawn."""
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
    subject: Subject,
    extent: Extent,
    arrays: Mapping[str, Any],
    known: Mapping[str, Any],
    *,
    naive: bool = False,
    is_causal: Any = None,
) -> dict[str, Any]:
    """The mechanism's results by name: "out" and, where claimed, "lse" and "state".

    The naive form also takes a traced `is_causal`.
    """
    keywords = fixed_options(subject, extent, arrays)
    keywords.update({k: v for k, v in arrays.items() if k != "slope"}, **known)
    for name in subject.case.masks.keys() & known.keys():
        keywords.update(subject.case.masks[name](known[name].shape[-1]))
    if "dropout_rng" in known:
        keywords["dropout_rng"] = jax.random.wrap_key_data(known["dropout_rng"])
    if extent.tuning and not naive:
        keywords.update(subject.case.tuning)
    if "is_causal" in keywords and is_causal is not None:
        keywords["is_causal"] = is_causal
    second = second_result(subject, extent, {} if naive else known)
    if second is not None:
        keywords["return_residual" if second == "lse" else "return_state"] = True
    function = subject.entry.naive if naive else subject.entry.function
    assert function is not None, f"the mechanism {subject.name!r} has no naive form"
    results = function(**keywords)
    return {"out": results} if second is None else {"out": results[0], second: results[1]}


@functools.cache
def traced_once(subject: Subject, extent: Extent):
    """`(arrays, known, cotangents) -> (results, gradients of arrays)`, traced once a shape."""

    def run(arrays, known, cotangents):
        # Users who forbid rank promotion can call every mechanism.
        with jax.numpy_rank_promotion("raise"):
            results, pull_back = jax.vjp(lambda a: call(subject, extent, a, known), arrays)
            return results, pull_back(cotangents)[0]

    return jax.jit(run)


@functools.cache
def program(subject: Subject, extent: Extent):
    """The compiled program of `traced_once`."""
    return jax.jit(traced_once(subject, extent))


@functools.cache
def _naive_program(subject: Subject, extent: Extent):
    def run(arrays, known, cotangents, is_causal):
        def refer(arrays):
            return call(subject, extent, arrays, known, naive=True, is_causal=is_causal)

        results, pull_back = jax.vjp(refer, arrays)
        rest = {name: x for name, x in results.items() if name not in cotangents}
        rest = jax.tree.map(jnp.zeros_like, rest)
        results = {name: results[name] for name in cotangents}
        return results, pull_back({**cotangents, **rest})[0]

    return jax.jit(run)


def run_naive(subject: Subject, sizes: Sizes, extent: Extent, arrays, known, cotangents) -> Any:
    """Results and gradients of the naive form, in the dtype of the arrays.

    One compiled program serves all calls of an extent, causal or not, padded, packed or neither.
    """
    known = {**neutral(subject, sizes, extent._replace(is_causal=True)), **known}
    # A subject without such options needs no other program for an extent that is not simple.
    simple = extent.simple or not any(map(subject.has, ("score_mod", "soft_cap", "dropout")))
    alike = extent._replace(is_causal=False, tuning=False, simple=simple)
    run = _naive_program(subject._replace(implementation=None), alike)
    return run(arrays, known, cotangents, extent.is_causal)


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
    """Name of the second result of the call, "lse" or "state", or None."""
    if subject.has("residual"):
        return "lse"
    with_state = "segment_ids" not in known or takes_segments(subject, extent)
    return "state" if subject.has("state") and with_state else None


def cast(subject: Subject, arrays: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The arrays in a dtype; parameters, decays and states in at least float32, as in use.

    A model projects its own arrays of tokens, gates and strengths from the tokens, so they have the
    dtype of the tokens. Decays are summed over tokens and stay in at least float32.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    narrow = {"bias", *subject.of_tokens} - subject.case.decays
    return {
        k: jax.tree.map(lambda x, to=dtype if k in narrow else wide: x.astype(to), v)
        for k, v in arrays.items()
    }


def to_numpy(tree: Any) -> Any:
    """The tree with NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


def as_float64(tree: Any) -> Any:
    """The tree with NumPy arrays in float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def assert_close(ours, expected, rtol: float, least: float = 1.0) -> None:
    """Asserts equality to `rtol` of each array's largest entry, or of `least` if that is larger."""
    for (path, a), b in zip(
        jax.tree.leaves_with_path(to_numpy(ours)), jax.tree.leaves(to_numpy(expected)), strict=True
    ):
        size = np.abs(b[np.isfinite(b)]).max(initial=least)
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * size, err_msg=jax.tree_util.keystr(path)
        )


# Most laws share two programs: query, key, value and own arguments in float32, and all claimed
# options in float64. Both are causal if the mechanism can be.


def draw_plain(subject: Subject, seed: int) -> dict[str, np.ndarray]:
    """Arrays of `run`: query, key, value and own arguments in float32."""
    return cast(subject, draw_arrays(subject, SQUARE, everything=False, seed=seed), jnp.float32)


def plain(subject: Subject) -> Extent:
    """The extent of `run`."""
    return Extent(is_causal=subject.has("causal"), tuning=subject.tuned)


def run(subject: Subject, arrays: Mapping[str, Any], cotangents: Any = None) -> Any:
    """Results and gradients in float32 without options, as NumPy arrays.

    Float64 is enabled, so a constant of the default dtype would turn float32 results to float64.
    """
    if cotangents is None:
        cotangents = plain_cotangents(subject)
    with jax.enable_x64(True):
        return to_numpy(program(subject, plain(subject))(arrays, {}, cotangents))


@functools.cache
def plain_cotangents(subject: Subject) -> Any:
    """Cotangents of `run`."""
    return cotangents_of(subject, plain(subject), draw_plain(subject, 0), {})


def everything(subject: Subject) -> Extent:
    """The extent of `run_everything`."""
    return Extent(is_causal=subject.has("causal"), everything=True)


def run_everything(subject: Subject, arrays: Mapping[str, Any], known, cotangents) -> Any:
    """Results and gradients in float64 with all claimed options, as NumPy arrays."""
    run = program(subject, everything(subject))
    return to_numpy(run(arrays, known, cotangents))
