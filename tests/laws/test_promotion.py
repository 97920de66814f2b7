"""No call, gradient or decoding step promotes dtypes or ranks unasked.

The flags are `jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"`. Only the
types of arrays are checked; nothing is computed. There are four heads, and the number of tokens is
above the sizes of a tile, a chunk, a block and a segment, and no multiple of any of them.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import RotaryEmbedding
from effattn.testing import functions, mixers
from effattn.testing.functions import SQUARE, Extent, Sizes
from tests.laws.battery import FIRST_MIXERS, LAST, MECHANISMS
from tests.marks import slow_but_for

ROWS, LENGTH, FEATURES, HEADS = 2, 301, 16, 4

QUICK = [s for s in MECHANISMS if s.name in ("softmax", "bigbird", "retention", "routing")]
QUICK_MIXERS = [s for s in FIRST_MIXERS if s.name in ("s4d", "recurrent_memory")]

dtyped = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@contextlib.contextmanager
def nothing_promoted():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def sizes_of(subject):
    """Long sequences, unless the options of the subject hold arrays for a fixed length."""
    options = subject.options
    if "max_length" in options or any(np.ndim(o) for o in options.values() if hasattr(o, "shape")):
        return SQUARE
    return Sizes((ROWS,), LENGTH, LENGTH, HEADS, 2 if subject.has("grouped") else HEADS)


def assert_no_gradient_promotes(subject, everything, to_dtypes):
    """Checks outputs and gradients in each direction, of arrays that `to_dtypes` has converted."""
    sizes = sizes_of(subject)
    for is_causal in [c for c in (True, False) if subject.has("causal" if c else "bidirectional")]:
        extent = Extent(is_causal, everything, tuning=False)
        arrays = to_dtypes(functions.draw_arrays(subject, sizes, everything))
        known = functions.neutral(subject, sizes, extent) if everything else {}
        cotangents = functions.cotangents_of(subject, extent, arrays, known)

        def run(arrays, known, cotangents, extent=extent):
            results, pull_back = jax.vjp(
                lambda arrays: functions.call(subject, extent, arrays, known), arrays
            )
            return results, pull_back(cotangents)

        with nothing_promoted():
            jax.eval_shape(run, arrays, known, cotangents)


@dtyped
@pytest.mark.parametrize("everything", [False, True], ids=["tokens alone", "all that is claimed"])
@pytest.mark.parametrize(
    "subject", slow_but_for(QUICK, dict.fromkeys([*MECHANISMS, *LAST])), ids=str
)
def test_functions_and_their_gradients(subject, everything, dtype):
    assert_no_gradient_promotes(
        subject, everything, lambda arrays: functions.cast(subject, arrays, dtype)
    )


@dtyped
@pytest.mark.parametrize("of_others", [jnp.float32, jnp.bfloat16], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    "subject", slow_but_for([s for s in MECHANISMS if s.name == "rwkv7"], MECHANISMS), ids=str
)
def test_decays_gates_and_parameters_of_any_dtype(subject, of_others, dtype):
    """Query, key and value have one dtype, all other arrays another one or the same."""

    def to_dtypes(arrays):
        tokens = {name: arrays.pop(name).astype(dtype) for name in ("query", "key", "value")}
        return tokens | jax.tree.map(lambda x: x.astype(of_others), arrays)

    assert_no_gradient_promotes(subject, everything=True, to_dtypes=to_dtypes)


def built(subject, **options):
    """The mixer that the registry builds, without values."""
    entry = subject.entry
    given = {"rotary": RotaryEmbedding(), "max_length": LENGTH + 20}
    options = {**entry.options_of_model(given), **options}
    return jax.eval_shape(
        lambda: entry.build(FEATURES, HEADS, is_causal=True, rngs=nnx.Rngs(0), **options)
    )


def assert_nothing_promoted(module, x, padding, most, *, decodes):
    """Checks the outputs and gradients, and decoding in pieces that grow."""

    def run(module, x, padding):
        y, pull_back = jax.vjp(lambda module, x: module(x, **padding), module, x)
        return y, pull_back(y)

    def decode(module, x, lengths):
        state = module.init_state(ROWS, most, x.dtype)
        y, state = module.extend(x[:, :-5], state, lengths=lengths)
        y, state = module.extend(x[:, -5:-1], state)
        return module.step(x[:, -1:], state)

    with nothing_promoted():
        for given in [{}, *({name: array} for name, array in padding.items())]:
            jax.eval_shape(run, module, x, given)
        if decodes:
            jax.eval_shape(decode, module, x, jnp.full((ROWS,), 3, jnp.int32))


DECODING = [s for s in MECHANISMS if s.has("decode")]


@pytest.mark.parametrize("subject", slow_but_for(QUICK, DECODING), ids=str)
def test_modules_and_decoding(subject):
    """In float32 only, because Flax's norms promote 16-bit dtypes by themselves."""
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, FEATURES), jnp.float32)
    padding = {"lengths": np.full(ROWS, 7, np.int32)} if subject.has("lengths") else {}
    if subject.has("segments"):
        padding["segment_ids"] = np.ones((ROWS, LENGTH), np.int32)
    assert_nothing_promoted(built(subject), x, padding, LENGTH + 9, decodes=True)


@pytest.mark.parametrize("mixer", slow_but_for(QUICK_MIXERS, FIRST_MIXERS), ids=str)
def test_mixers_without_heads_and_decoding(mixer):
    x = jax.ShapeDtypeStruct((ROWS, mixers.LENGTH, FEATURES), jnp.float32)
    module = jax.eval_shape(lambda: mixers.build(mixer, FEATURES, HEADS, **mixer.case.tuning))
    padding = {k: array[:ROWS] for k, array in mixers.padding(mixer).items()}
    decodes = mixer.is_causal and mixer.has("decode")
    assert_nothing_promoted(module, x, padding, mixers.LENGTH, decodes=decodes)
