"""`jax_debug_infs` and `jax_debug_nans` stop no valid call: forward, backward or decoding.

The calls run outside of any program, where JAX checks the results of each operation. They have rows
of unequal lengths, one of them empty, and packed documents with padding. A caller who asks for the
log-sum-exp expects its -inf, so this value is no error.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.testing import functions, mixers
from effattn.testing.functions import SQUARE, Extent
from tests.laws.battery import FIRST_MIXERS, MECHANISMS, mixer_of
from tests.laws.test_decode import DECODING
from tests.marks import slow, slow_but_for

ROWS, LENGTH = SQUARE.batch[0], SQUARE.keys
NAMES = ("softmax", "linear", "routing")
QUICK = [s for s in MECHANISMS if s.name in NAMES]
QUICK_MIXERS = [s for s in FIRST_MIXERS if s.name in ("aft_local", "recurrent_memory")]


def lengths_of(length):
    return np.array([length, 7, 1, 0], np.int32)


def ids_of(length):
    """Rows with one document, two documents, padding first, and padding only."""
    token = np.arange(length)
    rows = token >= 0, 2 - (token >= 5), 4 * (token >= 3), 0 * token
    return np.stack(rows).astype(np.int32)


@contextlib.contextmanager
def watched():
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


def padding_of(subject, is_causal):
    given = {"nothing": {}}
    if subject.has("lengths"):
        names = "query_seq_lengths", "key_value_seq_lengths"
        given["lengths"] = dict.fromkeys(names, lengths_of(LENGTH))
    if subject.has("segments") and functions.takes_segments(subject, Extent(is_causal)):
        given["packing"] = {"segment_ids": ids_of(LENGTH)}
    return given


@pytest.mark.parametrize("implementation", [None, slow("xla")])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("subject", slow_but_for(QUICK, MECHANISMS), ids=str)
def test_functions_and_their_gradients(subject, is_causal, implementation):
    if not subject.has("causal" if is_causal else "bidirectional"):
        return
    arrays = functions.draw_arrays(subject, SQUARE, everything=False)
    arrays = functions.cast(subject, arrays, jnp.float32)
    options = functions.fixed_options(subject, Extent(is_causal), arrays)
    if implementation and "implementation" in subject.parameters:
        options["implementation"] = implementation
    for padding in padding_of(subject, is_causal).values():

        def total(arrays, padding=padding):
            return subject.entry.function(**{**options, **arrays, **padding}).sum()

        with watched():
            total(arrays)
            jax.grad(total)(arrays)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_windows_and_kernels_of_more_tokens(implementation):
    """CPU kernels take 32 tokens; the keys of some rows are all beyond the window."""
    x = np.random.default_rng(0).normal(size=(2, 32, 2, 8)).astype(np.float32)
    for options in (
        {"is_causal": True, "key_value_seq_lengths": np.array([20, 0])},
        {"local_window_size": (2, 0), "query_offset": 40},
        {"mask": np.zeros((2, 1, 32, 32), bool)},
        {"sink": np.zeros(2, np.float32), "key_value_seq_lengths": np.array([0, 3])},
    ):

        def total(x, options=options):
            return effattn.dot_product_attention(
                x, x, x, implementation=implementation, **options
            ).sum()

        with watched():
            jax.value_and_grad(total)(x)


def test_a_row_of_nothing_has_the_logarithm_of_zero():
    x = np.ones((2, 5, 2, 8), np.float32)
    lengths = np.array([5, 0])
    window = functools.partial(effattn.sliding_window_attention, local_window_size=2)
    for attend in (effattn.dot_product_attention, window):
        out, lse = attend(x, x, x, key_value_seq_lengths=lengths, return_residual=True)
        assert (lse[1] == -np.inf).all() and np.isfinite(lse[0]).all() and not out[1].any()
        out, whole = effattn.combine([out, out], [lse, lse])
        assert (whole[1] == -np.inf).all() and np.isfinite(whole[0]).all()


def test_a_bias_of_the_least_number_is_not_the_absence_of_keys():
    """Rows with the least number as each logit attend to all keys alike, as in `jax.nn`."""
    x = np.random.default_rng(0).normal(size=(1, 20, 2, 8)).astype(np.float32)
    bias = np.full((20, 20), np.finfo(np.float32).min)
    for implementation in (None, "xla"):
        out, lse = effattn.dot_product_attention(
            x, x, x, bias, implementation=implementation, return_residual=True
        )
        np.testing.assert_allclose(out, x.mean(1, keepdims=True).repeat(20, 1), atol=1e-6)
        assert np.isfinite(lse).all()
        same, _ = effattn.combine([out, 0 * out], [lse, lse - np.inf])
        np.testing.assert_allclose(same, out, atol=1e-6)


@pytest.mark.parametrize("mixer", slow_but_for(QUICK_MIXERS, FIRST_MIXERS), ids=str)
def test_mixers_without_heads(mixer):
    module = mixers.cast(mixers.made(mixer), np.float32)
    x = mixers.tokens(1).astype(np.float32)
    length = x.shape[1]
    given = {
        "lengths": {"lengths": lengths_of(length)},
        "segments": {"segment_ids": ids_of(length)},
    }
    for padding in [{}, *(given[name] for name in given if mixer.has(name))]:
        with watched():
            module(x, **padding)
            jax.grad(lambda module, padding=padding: module(x, **padding).sum())(module)
    if mixer.is_causal and mixer.has("decode"):
        assert_decodes(module, x)


@pytest.mark.parametrize("subject", slow_but_for(QUICK, DECODING), ids=str)
def test_modules_and_decoding(subject):
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, 16)).astype(np.float32)
    module = mixer_of(subject)
    with watched():
        module(x)
    assert_decodes(module, x)


def assert_decodes(module, x):
    with watched():
        state = module.init_state(ROWS, x.shape[1], jnp.float32)
        _, state = module.extend(x[:, :5], state, lengths=np.array([5, 1, 0, 2]))
        module.step(x[:, 5:6], state)
