"""Parameters and modules among the options: each layer has and trains its own copy."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.nn import (
    CrossAttention,
    EncoderDecoder,
    EncoderDecoderConfig,
    HybridHeads,
    LinformerSelfAttention,
    LSHSelfAttention,
    MixtureOfMechanisms,
    SelfAttention,
    Transformer,
    TransformerConfig,
    TransformerLM,
    as_attention_fn,
)
from tests.marks import slow_but_for
from tests.nn.build import floats

FEATURES, HEADS, LENGTH, VOCABULARY = 8, 4, 6, 11


class DistanceBias(nnx.Module):
    """A learned bias of each head and each distance."""

    def __init__(self, heads: int = HEADS, seed: int = 0):
        self.table = nnx.Param(jax.random.normal(jax.random.key(seed), (heads, LENGTH)))

    def __call__(self, logit, b, h, i, j):
        distance = jnp.clip(jnp.abs(i - j), 0, LENGTH - 1)
        return logit + self.table[...].astype(logit.dtype)[h, distance]


class LearnedTurn(nnx.Module):
    def __init__(self):
        self.angle = nnx.Param(jnp.ones(()))

    def __call__(self, x, positions):
        return x * jnp.cos(self.angle[...] * positions.astype(x.dtype))[..., None, None]


def config(mixer, **options):
    return TransformerConfig(VOCABULARY, 2, FEATURES, HEADS, mixer=mixer, **options)


def tokens(seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (2, LENGTH))


def of(module):
    """The arrays of the module's parameters, by path."""
    flat = jax.tree.leaves_with_path(module)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def loss(module, *inputs):
    return jnp.sum(module(*inputs) ** 2)


def step(module, *inputs):
    """One step of gradient descent, in place, by Flax's own transformation."""
    gradient = nnx.jit(nnx.grad(loss))(module, *inputs)
    params = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))


SINK = {"name": "softmax", "sink": nnx.Param(jnp.zeros(HEADS))}
BIAS = {"name": "softmax", "score_mod": DistanceBias()}
WINDOW = {"name": "sliding_window", "local_window_size": (2, 0), "score_mod": BIAS["score_mod"]}
MIXTURE = {"name": "mixture_of_mechanisms", "mechanisms": (BIAS, WINDOW)}
HALVES = {
    "heads": [
        {"name": "softmax", "num_heads": 2, "score_mod": BIAS["score_mod"]},
        {"name": "sigmoid", "num_heads": 2, "score_mod": BIAS["score_mod"]},
    ]
}
LSH = {"name": "lsh", "rotary": LearnedTurn(), "num_buckets": 2, "chunk_length": 4}
PROJECTION = {
    "name": "linformer",
    "sharing": "layers",
    "max_length": LENGTH,
    "num_projected": 2,
    "projection": nnx.Param(jnp.ones((2, LENGTH))),
}
KINDS = {
    "sink": SINK,
    "score_mod": BIAS,
    "window": WINDOW,
    "mixture": MIXTURE,
    "heads": HALVES,
    "lsh": LSH,
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_one_model_leaves_the_other_and_the_configuration_as_they_are(kind):
    made = config(KINDS[kind])
    given = copy.deepcopy(of(KINDS[kind]))
    one, other = (TransformerLM(made, rngs=nnx.Rngs(0)) for _ in range(2))
    before = of(other)
    for name, array in of(one).items():
        np.testing.assert_array_equal(array, before[name])
    learned = [name for name in before if "table" in name or "sink" in name or "angle" in name]
    assert len(learned) >= 2
    step(one, tokens())
    for name, array in of(other).items():
        np.testing.assert_array_equal(array, before[name])
    after = of(one)
    assert all(np.any(after[name] != before[name]) for name in learned)
    for name, array in of(KINDS[kind]).items():
        np.testing.assert_array_equal(array, given[name])


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_layers_share_an_array(kind):
    """Layers share no buffer, because a training step may donate each of its arguments once."""
    model = TransformerLM(config(KINDS[kind]), rngs=nnx.Rngs(0))
    arrays = [x for x in jax.tree.leaves(model) if isinstance(x, jax.Array)]
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
    variables = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    assert len(variables) == len(arrays)


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: SelfAttention(FEATURES, HEADS, rngs=nnx.Rngs(0), **o),
        lambda **o: HybridHeads(
            FEATURES, HEADS, [{"name": "softmax", "num_heads": HEADS}], rngs=nnx.Rngs(0), **o
        ),
        lambda **o: MixtureOfMechanisms(
            FEATURES, HEADS, mechanisms=("softmax", "sigmoid"), rngs=nnx.Rngs(0), **o
        ),
    ],
    ids=["self", "heads", "mixture"],
)
def test_layers_given_the_same_module_learn_by_themselves(make):
    given = DistanceBias()
    one, other = make(score_mod=given), make(score_mod=given)
    before, x = of(other), floats(2, LENGTH, FEATURES)
    step(one, x)
    for name, array in of(other).items():
        np.testing.assert_array_equal(array, before[name])
    tables = [name for name in before if "table" in name]
    assert tables and all(np.any(of(one)[name] != before[name]) for name in tables)
    np.testing.assert_array_equal(given.table[...], DistanceBias().table[...])


def test_cross_attention_has_its_own():
    sink, bias = nnx.Param(jnp.zeros(HEADS)), DistanceBias()

    def make():
        return CrossAttention(FEATURES, HEADS, sink=sink, score_mod=bias, rngs=nnx.Rngs(0))

    one, other = make(), make()
    before = of(other)
    step(one, floats(2, 3, FEATURES), floats(2, LENGTH, FEATURES, seed=1))
    for name, array in of(other).items():
        np.testing.assert_array_equal(array, before[name])
    changed = [name for name, array in of(one).items() if np.any(array != before[name])]
    assert any("sink" in name for name in changed) and any("table" in name for name in changed)


def test_an_encoder_decoder_shares_none_between_its_sides_or_with_another_model():
    cross = {**SINK, "score_mod": BIAS["score_mod"]}
    made = EncoderDecoderConfig(
        encoder=config(BIAS, is_causal=False), decoder=config(BIAS), cross_attention=cross
    )
    one, other = (EncoderDecoder(made, rngs=nnx.Rngs(0)) for _ in range(2))
    before = of(other)
    assert sum("table" in name for name in before) == 6
    step(one, tokens(), tokens(1))
    for name, array in of(other).items():
        np.testing.assert_array_equal(array, before[name])
    assert all(np.any(of(one)[n] != before[n]) for n in before if "table" in n or "sink" in n)


def test_linformer_layers_that_share_do_so_within_one_model():
    made = config(PROJECTION, is_causal=False, positions="none")
    one, other = (Transformer(made, rngs=nnx.Rngs(0)) for _ in range(2))
    first, second = (block.mixer.key_projection for block in one.blocks)
    assert first is second and first is not other.blocks[0].mixer.key_projection
    step(one, tokens())
    np.testing.assert_array_equal(other.blocks[0].mixer.key_projection[...], 1)
    np.testing.assert_array_equal(PROJECTION["projection"][...], 1)
    assert np.any(one.blocks[0].mixer.key_projection[...] != 1)
    alone = LinformerSelfAttention(FEATURES, HEADS, **without_name(PROJECTION), rngs=nnx.Rngs(0))
    assert alone.key_projection is PROJECTION["projection"]


def without_name(options):
    return {name: option for name, option in options.items() if name != "name"}


def test_options_given_the_same_parameter_twice_keep_one():
    both = nnx.Param(jnp.ones((2, LENGTH)))
    layer = SelfAttention(
        FEATURES,
        HEADS,
        "linformer",
        key_projection=both,
        value_projection=both,
        is_causal=False,
        rngs=nnx.Rngs(0),
    )
    options = layer.array_options
    assert options["key_projection"] is options["value_projection"] is not both


# Modules as `score_mod`

WITH_SCORE_MOD = [
    n for n in registry.names("score_mod") if "decode" in registry.get(n).capabilities
]


@pytest.mark.parametrize("name", slow_but_for(("softmax", "bigbird"), WITH_SCORE_MOD))
def test_a_learned_score_mod_decodes_as_it_attends(name):
    entry = registry.get(name)
    small = {
        "sliding_window": {"local_window_size": (3, 0)},
        "dilated": {"local_window_size": (2, 0), "dilation": 2},
        "longformer": {"local_window_size": (3, 0)},
    }.get(name, {})
    layer = entry.build(FEATURES, HEADS, rngs=nnx.Rngs(0), score_mod=DistanceBias(), **small)
    x = floats(2, LENGTH, FEATURES)
    whole = jax.jit(lambda m, x: m(x))(layer, x)
    biased = [name for name in of(layer) if "table" in name]
    assert len(biased) == 1

    @jax.jit
    def pieces(layer, x):
        y, state = layer.extend(x[:, :3], layer.init_state(2, LENGTH))
        outputs = [y]
        for t in range(3, LENGTH):
            y, state = layer.step(x[:, t : t + 1], state)
            outputs.append(y)
        return jnp.concatenate(outputs, 1)

    np.testing.assert_allclose(pieces(layer, x), whole, rtol=2e-5, atol=2e-5)

    def squares(call):
        return jax.jit(jax.grad(lambda layer, x: jnp.sum(call(layer, x) ** 2)))(layer, x)

    expected = of(squares(lambda m, x: m(x)))[biased[0]]
    assert np.any(expected != 0)
    np.testing.assert_allclose(of(squares(pieces))[biased[0]], expected, rtol=2e-4, atol=2e-5)


def test_its_gradient_is_that_of_the_function_with_the_bias():
    layer = SelfAttention(FEATURES, HEADS, score_mod=DistanceBias(), rngs=nnx.Rngs(0))
    x = floats(1, LENGTH, FEATURES)
    gradient = jax.grad(loss)(layer, x)
    at = np.arange(LENGTH)

    def plain(table):
        query, key, value = layer._heads(x, None)
        bias = table[:, np.abs(at[:, None] - at)]
        out = effattn.dot_product_attention(query, key, value, bias[None], is_causal=True)
        return jnp.sum(layer.out(out) ** 2)

    expected = jax.grad(plain)(layer.array_options["score_mod"].table[...])
    got = gradient.array_options["score_mod"].table[...]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_groups_of_heads_count_their_heads_through_all():
    bias = DistanceBias()
    groups = [{"name": "softmax", "num_heads": 1}, {"name": "softmax", "num_heads": 3}]
    layer = HybridHeads(FEATURES, HEADS, groups, score_mod=bias, rngs=nnx.Rngs(0))
    gradient = jax.grad(loss)(layer, floats(1, LENGTH, FEATURES))
    tables = [mixer.array_options["score_mod"].score_mod.table[...] for mixer in gradient.mixers]
    for table, own in zip(tables, ([0], [1, 2, 3]), strict=True):
        np.testing.assert_array_equal(np.flatnonzero(np.any(table != 0, 1)), own)


def test_configurations_with_equal_modules_are_equal():
    assert config({"name": "softmax", "score_mod": DistanceBias()}) == config(BIAS)
    assert config({"name": "softmax", "score_mod": DistanceBias(3)}) != config(BIAS)


HIDING = {
    "method": DistanceBias().__call__,
    "partial": functools.partial(lambda bias, *args: bias(*args), DistanceBias()),
    "closure": (lambda bias: lambda *args: bias(*args))(DistanceBias()),
    "variable": (lambda sink: lambda logit, *_: logit + sink[...])(nnx.Param(jnp.zeros(()))),
}


@pytest.mark.parametrize("function", HIDING.values(), ids=HIDING)
def test_functions_that_hide_parameters_are_refused(function):
    """Hidden parameters would be constants, and the same in all layers."""
    with pytest.raises(ValueError, match="score_mod must not hold .*pass an nnx.Module"):
        SelfAttention(FEATURES, HEADS, score_mod=function, rngs=nnx.Rngs(0))


def test_attention_that_hides_parameters_is_refused():
    scale = nnx.Param(jnp.ones(()))

    def attention(query, key, value, *, is_causal=False):
        return effattn.dot_product_attention(query * scale[...], key, value, is_causal=is_causal)

    with pytest.raises(ValueError, match="attention must not hold .* a Param; pass an nnx.Module"):
        SelfAttention(FEATURES, HEADS, attention, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("option", [SINK["sink"], BIAS["score_mod"]], ids=["param", "module"])
def test_attention_functions_of_flax_hold_no_parameters(option):
    name = "sink" if isinstance(option, nnx.Variable) else "score_mod"
    with pytest.raises(ValueError, match=f"{name} .*SelfAttention"):
        as_attention_fn("softmax", **{name: option})


def test_a_layer_of_hashing_has_its_own_turn():
    given = LearnedTurn()
    layer = LSHSelfAttention(
        FEATURES, HEADS, rotary=given, num_buckets=2, chunk_length=4, rngs=nnx.Rngs(0)
    )
    assert layer.rotary is not given and layer.rotary.angle is not given.angle
