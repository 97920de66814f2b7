"""Options of Transformers change what they should, and wrong ones are named."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import registry
from effattn.nn import Alibi, Block, EncoderDecoderConfig, RotaryEmbedding, TransformerLM
from tests.marks import slow_but_for
from tests.nn.build import filled, floats
from tests.nn.calls import call
from tests.nn.small_models import CONFIG, PLAIN, TOKENS, close, made, make


def test_options_of_a_mixer_win_over_those_of_the_model():
    model = made(mixer=("softmax", {"name": "softmax", "rotary": None, "head_dim": 8}))
    first, second = (block.mixer for block in model.blocks)
    assert first.rotary is not None and second.rotary is None
    assert (first.head_dim, second.head_dim) == (4, 8)


def parameters(**changes):
    shapes = nnx.eval_shape(lambda: make(**changes))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param)))


def test_options_change_the_parameters_that_they_should():
    # Parameters per layer: q and o 16 * 16, k and v 16 * 8, two norms of heads of 4, SwiGLU of 48
    # (8/3 * 16 rounded up to a multiple of 8), two norms of 16.
    layer = 2 * 256 + 2 * 128 + 2 * 4 + 3 * 16 * 48 + 2 * 16
    expected = 13 * 16 + 2 * layer + 16
    assert parameters() == expected
    assert parameters(tie_embeddings=False) == expected + 13 * 16
    assert parameters(positions="learned", max_length=7) == expected + 7 * 16
    assert parameters(parallel=True) == expected - 2 * 16
    assert parameters(qk_norm=False) == expected - 2 * 8
    assert parameters(feed_forward="geglu") == expected
    assert parameters(feed_forward="gelu") == expected + 2 * (2 * 16 * 64 - 3 * 16 * 48)
    assert parameters(norm="layer") == expected + 5 * 16
    assert parameters(hidden_features=8) == expected - 2 * 3 * 16 * 40
    assert parameters(head_dim=8) == expected + 2 * (2 * 256 + 2 * 128 + 2 * 4)


def test_logits_are_of_the_head_where_embeddings_are_not_tied():
    model = made(**PLAIN, tie_embeddings=False)
    # NumPy arrays are changed in place, so the call must end before the change.
    logits = np.asarray(call(model, TOKENS))
    model.head.kernel[...] *= 2
    close(call(model, TOKENS), 2 * logits)


def test_parallel_layers_read_the_same_input():
    @jax.jit
    def run(block, x):
        h = block.mixer_norm(x)
        return block(x), x + block.mixer(h) + block.feed_forward(h)

    close(*run(made(parallel=True).blocks[0], floats(1, 4, 16)))


def test_residual_projections_start_smaller():
    @jax.jit
    def spreads():
        block = Block(dataclasses.replace(CONFIG, features=256, num_layers=8), 0, rngs=nnx.Rngs(0))
        layers = block.mixer.out, block.feed_forward.down, block.mixer.query
        return [jnp.std(layer.kernel[...]) for layer in layers]

    expected = (16 * 256) ** -0.5, (16 * 688) ** -0.5, 256**-0.5
    np.testing.assert_allclose(spreads(), expected, rtol=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an int, 1 or more, got 0"),
        ({"hidden_features": 0}, "hidden_features must be an int, 1 or more or None, got 0"),
        ({"positions": "fourier"}, "positions must be one of rotary"),
        ({"positions": "sinusoidal", "features": 15}, "needs an even number of features, got 15"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be a finite number above 0"),
        (
            {"feed_forward": "glu"},
            "feed_forward must be one of swiglu, geglu, gelu, relu, rwkv4, rwkv6, rwkv7, got 'glu'",
        ),
        ({"norm": "batch"}, "norm must be one of rms, layer, got 'batch'"),
        ({"norm": ["rms"]}, r"norm must be one of rms, layer, got \['rms'\]"),
        ({"positions": "learned"}, "positions='learned' needs max_length"),
        ({"mixer": "sofmax"}, "unknown mechanism 'sofmax'"),
        ({"mixer": {"local_window_size": 3}}, 'mixer must be .* as "name" and options, got {'),
        ({"mixer": ("softmax",)}, "num_layers=2 mixers, one for each layer, got 1"),
        ({"mixer": 3}, "mixer must be a registered name, .* got 3"),
        ({"mixer": None}, "mixer must be a registered name, .* got None"),
        ({"mixer": ("softmax", None)}, "mixer must be a registered name, .* got None"),
        ({"mixer": {"heads": []}}, "mixer .* one or more groups in .heads., got"),
        ({"mixer": {"heads": {"name": "softmax"}}}, "mixer .* one or more groups in .heads., got"),
        ({"max_length": 1.5}, "max_length must be an int, 1 or more or None, got 1.5"),
        ({"dropout_rate": 1.5}, r"dropout_rate must be a number in \[0, 1\), got 1.5"),
        ({"dropout_rate": None}, r"dropout_rate must be a number in \[0, 1\), got None"),
        ({"remat": True, "remat_policy": "save_only_these_names"}, "remat_policy must be one of"),
        ({"remat_policy": "dots_saveable"}, "needs remat=True"),
    ],
)
def test_bad_configurations_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def with_arrays(sink=2, block=True):
    """A configuration with arrays among its options, which are new in each call."""
    softmax = {"name": "softmax", "sink": nnx.Param(jnp.zeros(sink))}
    blocks = {"name": "block_sparse", "block_size": 3, "block_mask": np.full((3, 3), block)}
    return dataclasses.replace(CONFIG, mixer=[softmax, blocks])


def test_configurations_are_equal_by_the_values_of_arrays():
    one, same = with_arrays(), with_arrays()
    # A learned value is not part of the configuration.
    same.mixer[0]["sink"][...] += 1
    assert one == same and hash(one) == hash(same)
    assert one != with_arrays(sink=4) and one != with_arrays(block=False)
    both = [EncoderDecoderConfig(dataclasses.replace(c, is_causal=False), c) for c in (one, same)]
    assert both[0] == both[1]
    model = filled(lambda: TransformerLM(one, rngs=nnx.Rngs(0)))
    twins = jax.tree.map(lambda x, y: x is y, model, copy.deepcopy(model))
    assert not any(jax.tree.leaves(twins))


@pytest.mark.parametrize("option", ["rotary_theta", "rotary_scaling"])
def test_options_of_rotary_positions_need_these(option):
    with pytest.raises(ValueError, match=f"{option} needs positions='rotary', .* 'alibi', got"):
        make(positions="alibi", **{option: 2.0})


def test_positions_reach_the_mixers():
    model = made(**{**PLAIN, "positions": None}, rotary_theta=500.0, rotary_scaling=2.0)
    assert model.blocks[0].mixer.rotary == RotaryEmbedding(500.0, 2.0)
    model = made(**{**PLAIN, "positions": "alibi"})
    assert dict(model.blocks[0].mixer.options)["score_mod"] == Alibi(CONFIG.num_heads)


def test_a_mixer_that_cannot_do_what_the_model_asks_is_named():
    with pytest.raises(ValueError, match="'score_mod', which 'linear' lacks.*softmax"):
        make(mixer="linear", positions="alibi")
    with pytest.raises(ValueError, match="no option local_window_size"):
        make(mixer={"name": "linear", "local_window_size": 3})


def test_causal_mixers_are_refused_in_bidirectional_models():
    with pytest.raises(ValueError, match="'sparse_transformer' lacks 'bidirectional'"):
        make(is_causal=False, mixer="sparse_transformer")


DECODING = registry.names("decode")
FIRST_OF_FAMILY = {registry.get(name).family: name for name in reversed(DECODING)}.values()


@pytest.mark.parametrize("name", slow_but_for(FIRST_OF_FAMILY, DECODING))
def test_every_mechanism_that_decodes_builds_a_model(name):
    options = {"local_window_size": (2, 0)} if name == "sliding_window" else {}
    # Only mechanisms with keys have key heads.
    given = {} if registry.get(name).takes_heads else {"num_kv_heads": None}
    given |= {"mixer": {"name": name, **options}, "num_layers": 1, "max_length": 16}
    assert jax.eval_shape(lambda: make(**given)(TOKENS)).shape == (2, 9, 13)


def test_models_of_any_mixer_tell_the_order():
    """The mixer or rotary positions tell the order; where neither can, learned positions do."""
    entries = map(registry.get, registry.names())
    cannot = {entry.name for entry in entries if not (entry.knows_order or entry.takes_rotary())}
    by_token = {f"synthesizer{kind}" for kind in ("", "_factorized", "_mixture")}
    two_sided = {"fnet", "inducing_points"}
    assert cannot == {"aft_simple", *two_sided, *by_token}
    for name in cannot:
        alone = {"mixer": name, "num_layers": 1, "num_kv_heads": None}
        alone["is_causal"] = name not in two_sided
        assert made(**alone, max_length=9).positions is not None
        assert made(**alone, max_length=9, positions="none").positions is None
        for given in ({"max_length": 9, "positions": "rotary"}, {"max_length": None}):
            with pytest.raises(ValueError, match=f"mixer='{name}' takes no .* give positions"):
                make(**alone, **given)
    mixed = made(mixer=("aft_simple", "softmax"), num_layers=2, num_kv_heads=None)
    assert mixed.positions is None
