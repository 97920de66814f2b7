"""Subjects of the laws: one interface for functions of heads and for mixers.

A call has `arrays` with gradients by name, some of them tokens `(B, T, ...)`, and `known` arguments
without gradients (lengths, packing). It gives results by name ("out", "lse", "state") and the
gradients of the arrays. Two compiled programs serve nearly all laws: `run_single`, in float32 and
without options, and `run_wide`, in float64 with all claimed options and with small tiles.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st

from effattn import registry
from effattn.nn import RotaryEmbedding
from effattn.testing import functions, mixers
from effattn.testing.case import Case
from effattn.testing.functions import SQUARE

_INPUTS = ("query", "key", "value")

Arrays = dict[str, Any]
Results = tuple[dict[str, Any], dict[str, Any]]


class OfFunction:
    """A function of query, key and value."""

    tolerance = packed_tolerance = 1e-12
    least = 1.0
    decode_tolerance: Mapping[str, float] = MappingProxyType({"rtol": 2e-5, "atol": 2e-6})
    features, heads = 16, 4

    def __init__(self, subject: functions.Subject):
        self.subject, self.case, self.entry = subject, subject.case, subject.entry
        self.tokens, self.length, self.rows = subject.of_tokens, SQUARE.keys, SQUARE.batch[0]
        self.is_causal = subject.has("causal")
        self.has = subject.has
        # `SelfAttention` cannot make arrays that only the caller has.
        own = {*subject.case.own(subject.variant, np.random.default_rng(0), SQUARE)} - {*_INPUTS}
        self.has_mixer = not own or self.entry.mixer != "effattn.nn.SelfAttention"

    @property
    def is_normalized(self) -> bool:
        """True if the weights of a query sum to 1."""
        return self.case.normalized and self.subject.variant not in self.case.unnormalized

    def single(self, seed: int) -> Arrays:
        """Arrays of `run_single`, float32."""
        return functions.draw_plain(self.subject, seed)

    def run_single(self, arrays: Arrays, cotangents: Any = None) -> Results:
        """Results and gradients of query, key, value and own arguments."""
        return functions.run(self.subject, arrays, cotangents)

    def cotangents_single(self) -> Any:
        """Cotangents of `run_single`."""
        return functions.plain_cotangents(self.subject)

    def wide(self, seed: int) -> Arrays:
        """Arrays of `run_wide`, float64."""
        return functions.draw_arrays(self.subject, SQUARE, True, seed)

    def without_shared(self, arrays: Arrays) -> Arrays:
        """Arrays whose result does not depend on where a document stands."""
        arrays = dict(arrays)
        if "bias" in arrays:
            arrays["bias"] = np.zeros_like(arrays["bias"])
        if "initial_state" in arrays:
            empty = functions.empty_state(self.subject, SQUARE, jnp.float64)
            arrays["initial_state"] = empty
        return arrays

    def known(self) -> st.SearchStrategy:
        """Random lengths, packing, offsets and masks for `run_wide`."""
        return functions.draw_known(self.subject, SQUARE, functions.everything(self.subject))

    def neutral(self) -> Arrays:
        """Arguments for `run_wide` that pad, pack, move and mask nothing."""
        return functions.neutral(self.subject, SQUARE, functions.everything(self.subject))

    def padded(self, known: Arrays, row: int, length: int) -> None:
        """Sets the length of a row."""
        for side in ("query", "key_value"):
            known[f"{side}_seq_lengths"][row] = length

    def present(self, known: Arrays) -> dict[str, np.ndarray]:
        """Bool `(B, T)` by the name of tokens, those that are not padding."""
        ids = known.get("segment_ids", np.ones((self.rows, self.length), int))
        of_queries, of_keys = (
            (ids != 0) & (np.arange(self.length) < known[f"{side}_seq_lengths"][:, None])
            for side in ("query", "key_value")
        )
        by_query = {"query", *getattr(self.entry.naive, "per_query", ())}
        return {name: of_queries if name in by_query else of_keys for name in self.tokens}

    def cotangents_wide(self, arrays: Arrays, known: Arrays) -> Any:
        """Cotangents of `run_wide`."""
        extent = functions.everything(self.subject)
        return functions.cotangents_of(self.subject, extent, arrays, known)

    def run_wide(self, arrays: Arrays, known: Arrays, cotangents: Any) -> Results:
        """Results and gradients with all claimed options."""
        return functions.run_everything(self.subject, arrays, known, cotangents)

    def run_naive(self, arrays: Arrays, known: Arrays, cotangents: Any) -> Results:
        """Results and gradients of the naive form."""
        extent = functions.everything(self.subject)
        return functions.run_naive(self.subject, SQUARE, extent, arrays, known, cotangents)

    def extremes(self) -> Mapping[str, Arrays]:
        """Arrays of `run_single` with extreme values, by label."""
        arrays = self.single(0)
        found = {
            "logits of 1e4": {**arrays, "query": arrays["query"] * 1e2, "key": arrays["key"] * 1e2},
            "logits of -1e4": filled(arrays, query=-1e2, key=1e2),
            "equal keys": filled(arrays, key=1.0),
            "zeros": filled(arrays, query=0.0, key=0.0),
            "features of zero": filled(arrays, query=-1e4, key=-1e4),
            "subnormal features": filled(arrays, query=-45.0, key=-45.0),
        }
        found = {label: self.case.bounded(each) for label, each in found.items()}
        for decay in (0.0, -1e-30, -1e4) if self.case.decays else ():
            found[f"log decays of {decay}"] = filled(
                arrays, **dict.fromkeys(self.case.decays, decay)
            )
        return found

    @functools.cached_property
    def mixer(self) -> Any:
        """The mechanism's mixer with random parameters, for decoding."""
        given = self.case.module
        if given is None:
            given = {**self.subject.options, **self.case.decoding}
        defaults = self.entry.options
        options = {n: x for n, x in given.items() if x is not defaults.get(n)}

        def build():
            return self.entry.build(
                self.features,
                self.heads,
                num_kv_heads=2 if self.has("grouped") else self.heads,
                rngs=nnx.Rngs(0),
                **self.entry.options_of_model({"rotary": RotaryEmbedding()}),
                **options,
            )

        mixer = filled_at_random(build)
        for name, option in options.items():
            if isinstance(option, np.ndarray):
                mixer.array_options[name] = nnx.Variable(jnp.asarray(option))
        return mixer


class OfMixer:
    """A mixer without heads: the arrays are its tokens x and its parameters."""

    tolerance, packed_tolerance, least = 1e-10, 1e-11, 1e-3
    decode_tolerance: Mapping[str, float] = MappingProxyType({"rtol": 5e-5, "atol": 1e-5})
    tokens, length, rows = ("x",), mixers.LENGTH, mixers.ROWS
    has_mixer = True
    features, heads = mixers.FEATURES, mixers.HEADS

    def __init__(self, subject: mixers.Mixer):
        self.subject, self.case, self.entry = subject, subject.case, subject.entry
        self.is_causal, self.has = subject.is_causal, subject.has

    def single(self, seed: int) -> Arrays:
        """Arrays of `run_single`, float32."""
        x = mixers.tokens(seed).astype(np.float32)
        return {"x": x, "mixer": mixers.cast(mixers.made(self.subject), np.float32)}

    def run_single(self, arrays: Arrays, cotangents: Any = None) -> Results:
        """Outputs and gradients, without padding."""
        cotangents = self.cotangents_single() if cotangents is None else cotangents
        return _by_name(mixers.run(arrays["mixer"], arrays["x"], cotangents["out"], {}))

    def cotangents_single(self) -> Any:
        """Cotangents of `run_single`."""
        return {"out": mixers.tokens(2).astype(np.float32)}

    def wide(self, seed: int) -> Arrays:
        """Arrays of `run_wide`, float64."""
        return {"x": mixers.tokens(seed + 3), "mixer": mixers.made(self.subject, tuned=True)}

    def without_shared(self, arrays: Arrays) -> Arrays:
        """The arrays: nothing in them depends on where a document stands."""
        return dict(arrays)

    def known(self) -> st.SearchStrategy:
        """Random lengths and packing for `run_wide`."""
        given: dict[str, Any] = {}
        if self.has("lengths"):
            given["lengths"] = _rows(st.integers(0, self.length), self.rows)
        if self.has("segments"):
            given["segment_ids"] = _rows(functions.packings(self.length), self.rows)
        return st.fixed_dictionaries(given)

    def neutral(self) -> Arrays:
        """Arguments for `run_wide` that pad and pack nothing."""
        return mixers.padding(self.subject)

    def padded(self, known: Arrays, row: int, length: int) -> None:
        """Sets the length of a row."""
        known["lengths"][row] = length

    def present(self, known: Arrays) -> dict[str, np.ndarray]:
        """Bool `(B, T)` by the name of tokens, those that are not padding."""
        ids = known.get("segment_ids", np.ones((self.rows, self.length), int))
        return {"x": (ids != 0) & (np.arange(self.length) < known["lengths"][:, None])}

    def cotangents_wide(self, arrays: Arrays, known: Arrays) -> Any:
        """Cotangents of `run_wide`; zero in the padding, which a mixer may give any value."""
        out = mixers.tokens(2)
        if "lengths" in known:
            out = out * self.present(known)["x"][..., None]
        return {"out": out}

    def run_wide(self, arrays: Arrays, known: Arrays, cotangents: Any) -> Results:
        """Outputs and gradients with padding and packing."""
        return _by_name(mixers.run(arrays["mixer"], arrays["x"], cotangents["out"], known))

    def run_naive(self, arrays: Arrays, known: Arrays, cotangents: Any) -> Results:
        """Outputs and gradients of the naive form, which takes no padding."""
        mixer = mixers.made(self.subject)
        found = mixers.run_naive(self.subject, mixer, arrays["x"], cotangents["out"])
        results, gradients = _by_name(found)
        like = jax.tree.structure(arrays["mixer"])
        gradients["mixer"] = jax.tree.unflatten(like, jax.tree.leaves(gradients["mixer"]))
        return results, gradients

    def extremes(self) -> Mapping[str, Arrays]:
        """Arrays of `run_single` with extreme values, by label."""
        arrays = self.single(1)
        x = arrays["x"]
        found = {
            "zeros": np.zeros_like(x),
            "equal": np.ones_like(x),
            "large": x * np.float32(1e4),
            "of one sign": np.full_like(x, -1e4),
            "subnormal": x * np.float32(1e-42),
        }
        return {label: self.case.bounded({**arrays, "x": x}) for label, x in found.items()}

    @functools.cached_property
    def mixer(self) -> Any:
        """The mixer in float32, for decoding."""
        return mixers.cast(mixers.made(self.subject), np.float32)


Subject = OfFunction | OfMixer


@functools.cache
def subjects_of(name: str, case: Case) -> tuple[Subject, ...]:
    """The subjects of a mechanism: each variant, and for a mixer each direction."""
    if registry.get(name).takes_heads:
        return tuple(OfFunction(functions.Subject(name, v, case)) for v in case.variants)
    return tuple(
        OfMixer(mixers.Mixer(name, v, case, is_causal))
        for v in case.variants
        for is_causal in mixers.directions(name)
    )


def filled(arrays: Arrays, **values: float) -> Arrays:
    """The arrays, some of them filled with one value."""
    return {**arrays, **{name: np.full_like(arrays[name], x) for name, x in values.items()}}


def filled_at_random(build: Callable[[], Any], seed: int = 0, spread: float = 1 / 4) -> Any:
    """The module that `build()` returns, with random parameters, drawn without a program.

    Scales are near 1, other parameters near 0, integers are 0 and random keys are equal.
    """
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        values = rng.normal(scale=spread, size=leaf.shape)
        if "scale" in jax.tree_util.keystr(path):
            values += 1
        return values.astype(leaf.dtype)

    return jax.tree.map_with_path(fill, jax.eval_shape(build))


def _rows(each: st.SearchStrategy, rows: int) -> st.SearchStrategy:
    return st.lists(each, min_size=rows, max_size=rows).map(lambda x: np.asarray(x, np.int32))


def _by_name(found: Any) -> Results:
    y, (of_mixer, of_x) = jax.tree.map(np.asarray, found)
    return {"out": y}, {"mixer": of_mixer, "x": of_x}
