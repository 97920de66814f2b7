"""Every public function and module refuses wrong arguments in a sentence that names the argument.

The sweeps follow from the signatures, so that they include each new function.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.nn import (
    Block,
    ChunkedFeedForward,
    CrossAttention,
    EncoderDecoder,
    EncoderDecoderConfig,
    HybridHeads,
    MixtureOfExperts,
    RetNet,
    ReversibleStack,
    RotaryEmbedding,
    RWKV4ChannelMix,
    SelfAttention,
    ShortConvolution,
    SwiGLU,
    TransformerConfig,
    TransformerLM,
    as_attention_fn,
    generate,
)
from effattn.testing import functions
from tests.cases import MIXERS
from tests.laws import battery

PUBLIC = {name: getattr(effattn, name) for name in effattn.__all__}
FUNCTIONS = {name: one for name, one in PUBLIC.items() if inspect.isfunction(one)}
REGISTERED = {registry.get(n).function for n in registry.names()} - {None}
NO_ARRAYS = {"text": "text", "ragged": [[1.0], [1.0, 2.0]], "object": object(), "type": int}
OTHERWISE = {"rng", "dropout_rng", "segment_ids", "initial_state"}


def parameters(annotations):
    """Functions and the names of their parameters that are annotated in one of these ways."""
    return [
        pytest.param(function, p.name, p.annotation, id=f"{name}-{p.name}")
        for name, function in FUNCTIONS.items()
        for p in inspect.signature(function).parameters.values()
        if p.annotation in annotations and p.name not in OTHERWISE
    ]


def call_with(function, name, value):
    """Calls the function with this argument, and with arrays or True for required arguments."""
    given: dict[str, Any] = {name: value}
    for p in inspect.signature(function).parameters.values():
        if p.default is p.empty and p.name != name:
            given[p.name] = p.annotation is bool or np.ones((1, 4, 2, 4), np.float32)
    return function(**given)


def test_every_function_of_the_registry_is_swept():
    assert set(FUNCTIONS.values()) >= REGISTERED


@pytest.mark.parametrize(
    ("function", "name", "annotation"), parameters({jax.Array, jax.Array | None})
)
def test_what_is_no_array_is_named(function, name, annotation):
    bad = {**NO_ARRAYS, **({"none": None} if annotation is jax.Array else {})}
    for value in bad.values():
        with pytest.raises(ValueError, match=f"{name} must be an array of numbers, got "):
            call_with(function, name, value)


@pytest.mark.parametrize(("function", "name", "annotation"), parameters({bool, bool | None}))
def test_flags_are_true_or_false(function, name, annotation):
    none = [None] if annotation is bool else []
    for value in ("no", 1, 0.0, [], np.ones(2, bool), *none):
        with pytest.raises(ValueError, match=f"{name} must be True or False, got "):
            call_with(function, name, value)


@functools.cache
def arrays_of(subject):
    drawn = functions.draw_arrays(subject, functions.SQUARE, everything=False)
    return {name: np.asarray(x, np.float32) for name, x in drawn.items()}


def attend(subject, **options):
    return subject.entry.function(**arrays_of(subject), **{**subject.options, **options})


with_scale = pytest.mark.parametrize(
    "subject", [s for s in battery.MECHANISMS if "scale" in s.parameters], ids=str
)


@with_scale
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf], ids=str)
def test_a_scale_is_finite(subject, scale):
    for given in (scale, np.float32(scale), jnp.asarray(scale, jnp.float32)):
        with pytest.raises(ValueError, match=f"scale must be finite, got {scale}"):
            jax.eval_shape(lambda given=given: attend(subject, scale=given))


@with_scale
def test_a_scale_that_is_none_is_named(subject):
    for given in ("large", [1.0, 2.0], np.ones(2)):
        with pytest.raises(ValueError, match="scale must be"):
            attend(subject, scale=given)


with_lengths = pytest.mark.parametrize(
    "subject", [s for s in battery.MECHANISMS if s.has("lengths")], ids=str
)


@with_lengths
@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_are_not_negative(subject, name):
    lengths = np.array([3, -1, 2, 13])
    for given in (lengths, lengths.tolist(), jnp.asarray(lengths)):
        with pytest.raises(ValueError, match=f"{name} must be 0 or more, got -1"):
            attend(subject, **{name: given})
    with pytest.raises(ValueError, match=f"{name} must be 0 or more, got -1"):
        jax.eval_shape(lambda: attend(subject, **{name: lengths}))


@pytest.mark.parametrize(
    "name", [n for n in registry.names() if "lengths" in registry.get(n).capabilities]
)
def test_modules_take_no_lengths_that_there_are_not(name):
    mixer = jax.eval_shape(lambda: build(name))
    for wrong in (-1, 5):
        lengths = np.array([1, wrong])
        with pytest.raises(ValueError, match="^lengths must lie between 0 and the 4 tokens given"):
            jax.eval_shape(
                lambda m, lengths=lengths: m(jnp.ones((2, 4, 8)), lengths=lengths), mixer
            )


# Modules: constructor arguments and call arguments

MODULES = registry.names()


def build(name, **options):
    entry = registry.get(name)
    own = {} if entry.takes_heads else next(iter(MIXERS[name].variants.values()))
    causal = "causal" in entry.capabilities
    given = {"is_causal": causal, "rngs": nnx.Rngs(0), **own, **options}
    return entry.build(8, 2, **given)


@pytest.mark.parametrize("name", MODULES)
def test_modules_name_what_they_cannot_be_made_with(name):
    for rngs in (0, None, jax.random.key(0)):
        with pytest.raises(ValueError, match=r"rngs must be nnx.Rngs, such as nnx.Rngs\(0\), got"):
            build(name, rngs=rngs)
    takes = registry.get(name).mixer_takes
    for dtype in ("floaty", jnp.int32, bool, "complex64", 3):
        for which in filter(takes, ("dtype", "param_dtype")):
            with pytest.raises(ValueError, match=f"^{which} must be a floating-point dtype, "):
                build(name, **{which: dtype})
    with pytest.raises(ValueError, match="is_causal must be True or False, got 'no'"):
        build(name, is_causal="no")


@pytest.mark.parametrize("name", MODULES)
def test_modules_name_what_is_no_input(name):
    mixer = jax.eval_shape(lambda: build(name))
    decodes = "decode" in registry.get(name).capabilities
    state = jax.eval_shape(lambda m: m.init_state(1, 2), mixer) if decodes else None
    for x in (None, "text", [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match="x must be an array of numbers, got"):
            jax.eval_shape(lambda m, x=x: m(x), mixer)
        if decodes:
            with pytest.raises(ValueError, match="x must be an array of numbers, got"):
                jax.eval_shape(lambda m, s, x=x: m.extend(x, s), mixer, state)


def layers():
    """Layers that are in no registry."""
    heads = [{"name": "softmax", "num_heads": 2}]
    return {
        "cross": CrossAttention(8, 2, rngs=nnx.Rngs(0)),
        "heads": HybridHeads(8, 2, heads, rngs=nnx.Rngs(0)),
        "feed_forward": SwiGLU(8, 8, rngs=nnx.Rngs(0)),
        "experts": MixtureOfExperts(8, 8, 2, rngs=nnx.Rngs(0)),
        "chunked": ChunkedFeedForward(SwiGLU(8, 8, rngs=nnx.Rngs(0)), chunk_size=2),
        "convolution": ShortConvolution(8, 2, rngs=nnx.Rngs(0)),
        "reversible": ReversibleStack((SwiGLU(8, 8, rngs=nnx.Rngs(0)),) * 2),
        "channels": RWKV4ChannelMix(8, rngs=nnx.Rngs(0)),
        "block": Block(TransformerConfig(**CONFIG), 0, rngs=nnx.Rngs(0)),
    }


@pytest.mark.parametrize("x", [None, "text", [[1.0], [1.0, 2.0]]], ids=["none", "text", "ragged"])
def test_layers_name_what_is_no_input(x):
    for name, layer in layers().items():
        others = (np.ones((1, 2, 8), np.float32),) if name == "cross" else ()
        with pytest.raises(ValueError, match="x1? must be an array of numbers, got"):
            layer(x, *others)
        if others:
            with pytest.raises(ValueError, match="context must be an array of numbers, got"):
                layer(*others, x)


CONFIG = {"vocab_size": 5, "num_layers": 1, "features": 8, "num_heads": 2}


@pytest.mark.parametrize("which", ["dtype", "param_dtype"])
@pytest.mark.parametrize("dtype", ["floaty", jnp.int32, bool, 3], ids=str)
def test_configurations_name_their_dtypes(which, dtype):
    with pytest.raises(ValueError, match=f"{which} must be a floating-point dtype"):
        TransformerConfig(**CONFIG, **{which: dtype})


@pytest.mark.parametrize("flag", ["tie_embeddings", "parallel", "remat", "qk_norm", "is_causal"])
def test_configurations_name_their_flags(flag):
    with pytest.raises(ValueError, match=f"{flag} must be True or False, got 'no'"):
        TransformerConfig(**CONFIG, **{flag: "no"})


def model():
    return TransformerLM(TransformerConfig(**CONFIG), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("tokens", [None, "text", [[1], [1, 2]]], ids=["none", "text", "ragged"])
def test_models_name_what_are_no_tokens(tokens):
    of_text = model()
    for call in (
        of_text,
        lambda tokens: of_text.extend(tokens, of_text.init_state(1, 4)),
        lambda tokens: of_text.step(tokens, of_text.init_state(1, 4)),
    ):
        with pytest.raises(ValueError, match="tokens must be an array of numbers, got"):
            call(tokens)
    with pytest.raises(ValueError, match="prompt must be an array of numbers, got"):
        generate(of_text, tokens, max_new_tokens=1, temperature=0)
    with pytest.raises(ValueError, match="rngs must be nnx.Rngs"):
        TransformerLM(TransformerConfig(**CONFIG), rngs=0)


@pytest.mark.parametrize("what", [None, "model", lambda tokens: tokens], ids=type)
def test_what_is_no_model_is_named(what):
    with pytest.raises(ValueError, match="model must have init_state and extend, got a "):
        generate(what, np.ones((1, 2), np.int32), max_new_tokens=1, temperature=0)


@pytest.mark.parametrize("config", [None, {}, "small"], ids=str)
def test_what_is_no_configuration_is_named(config):
    with pytest.raises(ValueError, match="config must be a TransformerConfig, got"):
        TransformerLM(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="config must be an EncoderDecoderConfig, got"):
        EncoderDecoder(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="encoder must be a TransformerConfig, got"):
        EncoderDecoderConfig(config, TransformerConfig(**CONFIG))


@pytest.mark.parametrize("rngs", [0, "seed", np.ones(3)], ids=str)
def test_what_is_no_key_for_dropout_is_named(rngs):
    layer = SelfAttention(8, 2, dropout_rate=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rngs must be a jax.random key"):
        layer(jnp.ones((1, 2, 8)), rngs=rngs)


# Functions as arguments

QUERY = np.ones((1, 4, 2, 4), np.float32)
WITH_SCORE_MOD = [s for s in battery.MECHANISMS if s.has("score_mod")]


@pytest.mark.parametrize("subject", WITH_SCORE_MOD, ids=str)
def test_a_score_mod_of_another_arity_is_named(subject):
    for score_mod in (lambda logit: logit, lambda *, logit: logit, lambda a, b, c, d, e, f: a):
        with pytest.raises(ValueError, match=r"score_mod must be a function \(logit, b, h, i, j\)"):
            attend(subject, score_mod=score_mod)
    with pytest.raises(ValueError, match=r"score_mod must be a function .*, got 3"):
        attend(subject, score_mod=3)
    jax.eval_shape(lambda: attend(subject, score_mod=lambda logit, *_: logit))


def test_a_feature_map_of_another_arity_is_named():
    for feature_map in (lambda: 1, lambda x, y: x):
        with pytest.raises(ValueError, match=r"feature_map must be a function \(x\), got one that"):
            effattn.linear_attention(QUERY, QUERY, QUERY, feature_map=feature_map)


@pytest.mark.parametrize("rng", [0, None, 1.5, "seed", np.zeros(2)], ids=str)
def test_what_is_no_key_is_named(rng):
    with pytest.raises(ValueError, match="rng must be a jax.random key, got"):
        effattn.performer_features(rng, 4, 4)
    with pytest.raises(ValueError, match="rng must be a jax.random key, got"):
        effattn.lsh_rotations(rng, 1, 4, 4)
    if rng is not None:
        options = {"num_buckets": 4, "num_rounds": 1, "chunk_length": 2}
        with pytest.raises(ValueError, match="rng must be a jax.random key, got"):
            effattn.lsh_attention(QUERY, QUERY, **options, rng=rng)
    with pytest.raises(ValueError, match="dropout_rng, a jax.random key"):
        effattn.dot_product_attention(QUERY, QUERY, QUERY, dropout_rate=0.5, dropout_rng=rng)


@pytest.mark.parametrize("dtype", ["floaty", jnp.int32, None], ids=str)
def test_draws_name_their_dtype(dtype):
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype"):
        effattn.performer_features(jax.random.key(0), 4, 4, dtype=dtype)
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype"):
        effattn.lsh_rotations(jax.random.key(0), 1, 4, 4, dtype=dtype)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (effattn.nystrom_attention, {"num_landmarks": 2}),
        (
            effattn.linformer_attention,
            dict.fromkeys(("key_projection", "value_projection"), np.ones((2, 8))),
        ),
        (effattn.block_sparse_attention, {"block_size": 2, "block_mask": np.ones((4, 4), bool)}),
    ],
    ids=["nystrom", "linformer", "block sparse"],
)
def test_packed_arrays_without_heads_are_named(function, options):
    x = np.ones((8, 4), np.float32)
    with pytest.raises(ValueError, match=r"query must have shape \(\*batch, length, heads, head"):
        function(x, x, x, segment_ids=np.ones(8, int), **options)


# The registry, and mechanisms of other packages


@pytest.mark.parametrize("name", [[], {}, None, 3, SelfAttention], ids=str)
def test_what_is_no_name_is_named(name):
    with pytest.raises(ValueError, match="unknown mechanism .*registered are softmax"):
        registry.get(name)
    if name is not None:
        with pytest.raises(ValueError, match="unknown capability"):
            registry.names(name)


def test_advice_names_the_class_where_it_is(monkeypatch):
    def elsewhere(query, key, value, *, weights):
        return value

    common = {"family": "exact", "paper": "-", "complexity": "-", "time_exponent": 1.0}
    takes = {"capabilities": frozenset({"bidirectional"}), "function": elsewhere}
    made = registry.Mechanism(name="theirs", builder="their.package:Layer", **common, **takes)
    monkeypatch.setitem(registry._MECHANISMS, "theirs", made)
    with pytest.raises(ValueError, match=r"or use their\.package\.Layer$"):
        as_attention_fn("theirs")(QUERY, QUERY, QUERY)
    mixer = registry.Mechanism(
        name="their_mixer", builder="their.package:Mixer", takes_heads=False, **common, **takes
    )
    monkeypatch.setitem(registry._MECHANISMS, "their_mixer", mixer)
    with pytest.raises(ValueError, match=r"use its mixer their\.package\.Mixer$"):
        as_attention_fn("their_mixer")
    with pytest.raises(ValueError, match=r"use its mixer effattn\.nn\.GRU$"):
        as_attention_fn("gru")


# Pages


def pages(table, lengths=(5, 3)):
    pool = np.ones((5, 4, 1, 8), np.float32)
    query = np.ones((len(lengths), 1, 2, 8), np.float32)
    return effattn.paged_attention(query, pool, pool, block_table=table, lengths=lengths)


@pytest.mark.parametrize("entry", [99, 5, -1])
def test_pages_that_there_are_not_are_named(entry):
    with pytest.raises(
        ValueError, match=f"block_table must hold page numbers from 0 to 4.*got {entry}"
    ):
        pages(np.array([[0, entry], [2, 3]]))
    # No call reads the entries behind the last page of a sequence.
    assert np.isfinite(pages(np.array([[0, 1], [2, entry]]))).all()
    traced = jax.jit(pages)(np.array([[0, 1], [2, entry]]))
    np.testing.assert_array_equal(traced, pages(np.array([[0, 1], [2, 3]])))
    with pytest.raises(ValueError, match="lengths must be 0 or more, got -2"):
        pages(np.array([[0, 1], [2, 3]]), (5, -2))
    with pytest.raises(ValueError, match="block_table must be an array of numbers, got None"):
        pages(None)


def test_names_of_parameters_are_checked_wherever_they_are_given():
    """Positional arguments are checked too."""
    with pytest.raises(ValueError, match="^key must be an array of numbers, got 'text'"):
        effattn.dot_product_attention(QUERY, "text", QUERY)
    with pytest.raises(ValueError, match="rngs must be nnx.Rngs"):
        RetNet(8, 2, rngs=1)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        effattn.dot_product_attention(QUERY, QUERY, QUERY, cause=True)
    with pytest.raises(ValueError, match="positions must be an array of numbers"):
        RotaryEmbedding()(QUERY, None)
