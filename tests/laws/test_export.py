"""A program exported with an open length gives the right results at every length.

Otherwise the export is refused with a sentence that says which size must be known.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import effattn
from effattn.testing import functions, mixers
from effattn.testing.functions import SQUARE, Extent, Sizes
from tests.laws.battery import LAYERS, MECHANISMS
from tests.laws.test_decode import mixer_of
from tests.marks import slow_but_for

LONG, LENGTHS = 37, (37, 21)
REFUSED = "needs a length that is known when it is traced"
# Mechanisms that only walk through the tokens in tiles or chunks.
OPEN = {
    *("softmax", "additive", "sigmoid", "squared_relu", "sliding_window", "longformer"),
    *("adaptive_span", "differential", "latent", "stick_breaking", "entmax", "talking_heads"),
    "gated_attention",
    *("linear", "retention", "gated_linear", "mamba2", "rwkv6", "delta_net", "gated_delta_net"),
    *("delta_product", "kimi_delta", "gated_delta_net_2"),
    *("rwkv7", "mesa", "random_features", "based", "hedgehog", "hgrn2", "gated_slot", "lightning"),
    *("lstm", "slstm", "gru", "convolution", "mixture_of_mechanisms", "convolution_attention"),
    "inducing_points",
    "luna",
}
QUICK = [s for s in MECHANISMS if s.name in ("softmax", "linear", "delta_net")]
QUICK += [s for s in MECHANISMS if s.name not in OPEN]


def exported(run, arrays, open_arrays, **more):
    """Exports a program with `t` as the second axis of the open arrays."""
    (t,) = export.symbolic_shape("t")

    def shape_of(x, is_open):
        shape = (x.shape[0], t, *x.shape[2:]) if is_open else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype)

    shapes = {
        k: jax.tree.map(functools.partial(shape_of, is_open=k in open_arrays), x)
        for k, x in arrays.items()
    }
    return export.export(jax.jit(run), **more)(shapes)


def assert_agrees(run, arrays, open_arrays, lengths=LENGTHS):
    """Checks that the exported program agrees with the call at each length."""
    program = exported(run, arrays, open_arrays)
    for length in lengths:
        part = {k: x[:, :length] if k in open_arrays else x for k, x in arrays.items()}
        functions.assert_close(program.call(part), run(part), 1e-5)


@pytest.mark.parametrize("subject", slow_but_for(QUICK, MECHANISMS), ids=str)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_functions_with_lengths_and_gradients(subject, is_causal):
    if not subject.has("causal" if is_causal else "bidirectional"):
        return
    options = subject.options
    fixed = "max_length" in options or any(hasattr(o, "shape") and o.ndim for o in options.values())
    sizes = SQUARE if fixed else Sizes((3,), LONG, LONG, 4, 2 if subject.has("grouped") else 4)
    extent = Extent(is_causal, tuning=False)
    arrays = functions.draw_arrays(subject, sizes, everything=False)
    arrays = functions.cast(subject, arrays, jnp.float32)
    known = {}
    if subject.has("lengths"):
        lengths = np.array([LONG, 19, 1, 0], np.int32)[: sizes.batch[0]]
        known = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}

    def run(given):
        given = {**given}
        padding = {k: given.pop(k) for k in known}

        def out(arrays):
            return functions.call(subject, extent, arrays, padding)["out"]

        y, pull_back = jax.vjp(out, given)
        return y, pull_back(jnp.cos(y))

    if subject.name in OPEN:
        assert_agrees(run, {**arrays, **known}, subject.of_tokens)
        return
    with pytest.raises(ValueError, match=REFUSED):
        exported(run, {**arrays, **known}, subject.of_tokens)


rng = np.random.default_rng(0)
QUERY, KEY = (rng.normal(size=(2, LONG, heads, 8)).astype(np.float32) for heads in (4, 2))
IDS = np.repeat([[3, 1, 0], [2, 2, 5]], [9, 20, 8], axis=1).astype(np.int32)
SLOPES = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
OPTIONS = {
    "packing": {"segment_ids": IDS},
    "a window and an offset": {"local_window_size": (5, 3), "query_offset": 2},
    "offsets of rows": {"is_causal": True, "query_offset": np.array([1, 4])},
    "a score_mod": {
        "score_mod": lambda logit, b, h, i, j: logit - jnp.asarray(SLOPES)[h] * jnp.abs(i - j)
    },
    "a sink and a cap": {"sink": SLOPES, "logits_soft_cap": 2.0},
    "dropout": {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0)},
    "a tile": {"is_causal": True, "tile": (16, 16)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_softmax_attention_with(name):
    options = dict(OPTIONS[name])
    arrays = {"query": QUERY, "key": KEY, "value": KEY}
    arrays |= {"segment_ids": options.pop("segment_ids")} if "segment_ids" in options else {}

    def run(arrays):
        return effattn.dot_product_attention(**arrays, **options)

    assert_agrees(run, arrays, arrays)


def test_packed_recurrences():
    def run(arrays):
        attend = functools.partial(effattn.linear_attention, implementation="xla")
        return attend(**arrays, is_causal=True), attend(**arrays)

    arrays = {"query": QUERY, "key": KEY, "value": KEY, "segment_ids": IDS}
    assert_agrees(run, arrays, arrays)


@pytest.mark.parametrize("name", ["llvm", "triton", "mosaic_tpu", "pallas"])
@pytest.mark.parametrize(
    "function", [effattn.dot_product_attention, effattn.linear_attention], ids=lambda f: f.__name__
)
def test_a_kernel_that_is_named_says_that_it_needs_the_length(function, name):
    arrays = {"query": QUERY, "key": KEY, "value": KEY}
    run = lambda arrays: function(**arrays, is_causal=True, implementation=name)  # noqa: E731
    with pytest.raises(
        NotImplementedError, match="takes lengths that are known when it is traced, got t"
    ):
        exported(run, arrays, arrays)


MODULES = [s for s in MECHANISMS if s.has("decode")]
QUICK_LAYERS = [s for s in LAYERS if s.name in ("lstm", "hyena", "aft_conv", "s4d", "latent")]
QUICK_MODULES = [s for s in MODULES if s.name in ("softmax", "linear", "bigbird", "routing")]


def assert_module_agrees_or_says(name, call, x):
    if name in OPEN:
        assert_agrees(call, {"x": x}, ["x"])
        return
    with pytest.raises(ValueError, match=REFUSED):
        exported(call, {"x": x}, ["x"])


@pytest.mark.parametrize("subject", slow_but_for(QUICK_MODULES, MODULES), ids=str)
def test_modules(subject):
    module = mixer_of(subject)
    x = np.random.default_rng(1).normal(size=(2, LONG, 16)).astype(np.float32)
    assert_module_agrees_or_says(subject.name, lambda arrays: module(arrays["x"]), x)


@pytest.mark.parametrize("mixer", slow_but_for(QUICK_LAYERS, LAYERS), ids=str)
def test_mixers_without_heads(mixer):
    module = mixers.cast(mixers.made(mixer), np.float32)
    x = np.random.default_rng(1).normal(size=(2, LONG, mixers.FEATURES)).astype(np.float32)
    assert_module_agrees_or_says(mixer.name, lambda arrays: module(arrays["x"]), x)


OPEN_DECODING = {
    *OPEN,
    *("lsh", "aft_full", "aft_local", "aft_conv", "hyena", "long_convolution"),
    *("synthesizer", "gmlp"),
    *("synthesizer_factorized", "synthesizer_random", "synthesizer_factorized_random"),
    *("synthesizer_mixture", "s4", "recurrent_memory", "streaming"),
}


def assert_extends_or_says(name, module, x):
    """Extends a state of known size by a prompt of open length, or expects the refusal."""

    def extend(arrays):
        return module.extend(arrays["x"], module.init_state(2, x.shape[1], jnp.float32))

    if name in OPEN_DECODING:
        assert_agrees(extend, {"x": x}, ["x"], lengths=(13, 8))
        return
    with pytest.raises(ValueError, match=REFUSED):
        exported(extend, {"x": x}, ["x"])


@pytest.mark.parametrize("subject", slow_but_for(QUICK_MODULES, MODULES), ids=str)
def test_prompts_of_modules(subject):
    x = np.random.default_rng(1).normal(size=(2, SQUARE.keys, 16)).astype(np.float32)
    assert_extends_or_says(subject.name, mixer_of(subject), x)


@pytest.mark.parametrize(
    "mixer", slow_but_for(QUICK_LAYERS, [s for s in LAYERS if s.has("decode")]), ids=str
)
def test_prompts_of_mixers_without_heads(mixer):
    module = mixers.cast(mixers.made(mixer), np.float32)
    x = mixers.tokens(1, rows=2).astype(np.float32)
    assert_extends_or_says(mixer.name, module, x)
