"""Different mechanisms in different heads, and in different layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import (
    Alibi,
    HybridHeads,
    RotaryEmbedding,
    SelfAttention,
    TransformerConfig,
    TransformerLM,
)
from tests.nn.build import filled, floats

GROUPS = (
    {"name": "softmax", "num_heads": 2},
    {"name": "sliding_window", "num_heads": 4, "local_window_size": (2, 0)},
)


def make(groups=GROUPS, num_heads=6, **options):
    return HybridHeads(24, num_heads, groups, rngs=nnx.Rngs(0), **options)


def made(*args, **options):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: make(*args, **options))


@pytest.fixture(scope="module")
def x():
    return floats(2, 9, 24)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_it_is_one_projection_of_all_heads_side_by_side(x):
    """One module whose two halves of heads attend differently gives the same results."""
    alibi = Alibi(6)
    hybrid = made(num_kv_heads=3, score_mod=alibi, rotary=RotaryEmbedding())
    assert [mixer.num_kv_heads for mixer in hybrid.mixers] == [1, 2]

    def attention(query, key, value, *, is_causal=False):
        from effattn import dot_product_attention, sliding_window_attention

        whole = dot_product_attention(query, key, value, is_causal=is_causal, score_mod=alibi)
        near = sliding_window_attention(
            query, key, value, local_window_size=(2, 0), is_causal=is_causal, score_mod=alibi
        )
        return jnp.concatenate([whole[..., :2, :], near[..., 2:, :]], axis=-2)

    options = {"num_kv_heads": 3, "rotary": RotaryEmbedding(), "is_causal": False}
    one = filled(lambda: SelfAttention(24, 6, attention, **options, rngs=nnx.Rngs(1)))
    one.attention = lambda q, k, v: attention(q, k, v, is_causal=True)
    for name, axis in (("query", 1), ("key", 1), ("value", 1), ("out", 0)):
        parts = [getattr(mixer, name).kernel[...] for mixer in hybrid.mixers]
        getattr(one, name).kernel[...] = np.concatenate(parts, axis)
    close(*jax.jit(lambda x: (hybrid(x), one(x)))(x))


def test_the_sum_starts_as_one_projection_would():
    @jax.jit
    def spreads():
        groups = [{"name": "softmax", "num_heads": n} for n in (1, 3)]
        hybrid = HybridHeads(256, 4, groups, rngs=nnx.Rngs(0))
        return [jnp.std(mixer.out.kernel[...]) for mixer in hybrid.mixers]

    np.testing.assert_allclose(spreads(), 256**-0.5, rtol=0.05)


def test_decoding_in_any_pieces_gives_what_the_whole_gives(x):
    hybrid = made()
    expected = jax.jit(lambda hybrid, x: hybrid(x))(hybrid, x)
    state = hybrid.init_state(2, 9)
    extend = jax.jit(lambda hybrid, x, state: hybrid.extend(x, state))
    outs = []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        out, state = extend(hybrid, x[:, start:stop], state)
        outs.append(out)
    close(np.concatenate(outs, 1), expected)
    assert state.length.tolist() == [9, 9]
    # The heads of the window keep only the keys that the window reaches.
    assert state.groups[0].key.shape[1] == 9 and state.groups[1].key.shape[1] == 2
    with pytest.raises(ValueError, match="step takes one token"):
        hybrid.step(x, state)


def test_groups_drop_apart(x):
    groups = [{"name": "softmax", "num_heads": 3}] * 2
    hybrid = made(groups, dropout_rate=0.5)
    second, first = hybrid.mixers
    for name in ("query", "key", "value", "out"):
        getattr(first, name).kernel[...] = getattr(second, name).kernel[...]

    @jax.jit
    def run(hybrid, key):
        second, first = hybrid.mixers
        keys = jax.random.split(key, 2)
        apart = second(x, rngs=keys[0]) + first(x, rngs=keys[1])
        return hybrid(x), first(x), hybrid(x, rngs=key), apart

    same, alone, dropped, apart = map(np.asarray, run(hybrid, jax.random.key(0)))
    close(same, 2 * alone)
    assert np.abs(dropped - same).max() > 1e-3
    close(dropped, apart)


def test_heads_that_cannot_share_keys_stand_beside_others(x):
    groups = [{"name": "lsh", "num_heads": 2}, {"name": "softmax", "num_heads": 4}]
    hybrid = jax.eval_shape(lambda: make(groups))
    assert jax.eval_shape(lambda hybrid: hybrid(x), hybrid).shape == x.shape
    with pytest.raises(ValueError, match="'lsh' has no option num_kv_heads"):
        make(groups, num_kv_heads=3)


def test_a_state_may_be_donated(x):
    extend = jax.jit(lambda hybrid, x, state: hybrid.extend(x, state), donate_argnums=2)
    hybrid = made()
    y, _ = extend(hybrid, x, hybrid.init_state(2, 9))
    close(y, jax.jit(lambda hybrid: hybrid(x))(hybrid))


@pytest.mark.devices
def test_initial_values_may_say_how_they_are_sharded():
    init = nnx.initializers.lecun_normal()
    placed_init = nnx.with_partitioning(init, (None, "model"))
    with jax.set_mesh(jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,))):
        hybrids = [make(kernel_init=kernel_init) for kernel_init in (init, placed_init)]
    for plain, placed in zip(*(hybrid.mixers for hybrid in hybrids), strict=True):
        np.testing.assert_array_equal(placed.out.kernel[...], plain.out.kernel[...])
        assert placed.out.kernel.out_sharding == (None, "model")


def config(**changes):
    return TransformerConfig(
        **{"vocab_size": 11, "num_layers": 3, "features": 24, "num_heads": 6, **changes}
    )


@pytest.mark.slow
def test_a_model_takes_groups_of_heads_in_some_layers():
    tokens = np.arange(16).reshape(2, 8) % 11
    of_model = config(num_layers=2, mixer=({"heads": GROUPS}, "linear"), num_kv_heads=3)
    model = filled(lambda: TransformerLM(of_model, rngs=nnx.Rngs(0)))
    assert isinstance(model.blocks[0].mixer, HybridHeads)
    extend = jax.jit(lambda model, tokens, state: model.extend(tokens, state))
    first, state = extend(model, tokens[:, :4], model.init_state(2, 8))
    second, _ = extend(model, tokens[:, 4:], state)
    whole = jax.jit(lambda model: model(tokens))(model)
    close(np.concatenate([first, second], 1), whole)


def test_dilation_and_windows_grow_with_depth():
    model = filled(lambda: TransformerLM(config(mixer="dilated"), rngs=nnx.Rngs(0)))
    assert [dict(block.mixer.options)["dilation"] for block in model.blocks] == [1, 2, 4]
    mixers = [{"name": "sliding_window", "local_window_size": (2**n, 0)} for n in range(3)]
    model = filled(lambda: TransformerLM(config(mixer=mixers), rngs=nnx.Rngs(0)))
    state = model.init_state(1, 9)
    assert [layer.key.shape[1] for layer in state.layers] == [1, 2, 4]
    fixed = config(mixer={"name": "dilated", "dilation": 3})
    assert [fixed.layer_mixer(n)[0]["dilation"] for n in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("name", ["bigbird", "random"])
def test_layers_draw_random_blocks_of_their_own(name):
    def seeds(mixer):
        of_layers = config(mixer=mixer, num_layers=3)
        return [of_layers.layer_mixer(layer)[0]["seed"] for layer in range(3)]

    assert seeds(name) == [0, 1000, 2000]
    assert seeds({"name": name, "seed": 7}) == [7, 7, 7]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: make([{"name": "softmax"}]), '"name" and its "num_heads", an int, got'),
        (
            lambda: make([{"name": "softmax", "num_heads": "6"}]),
            '"name" and its "num_heads", an int, got',
        ),
        (lambda: make([1, 5]), '"name" and its "num_heads", an int, got 1'),
        (lambda: make(None), "groups must be a sequence of mappings, got None"),
        (lambda: make(num_kv_heads=4), r"\(6\) must be a positive multiple of num_kv_heads \(4\)"),
        (lambda: make(num_kv_heads=12), r"a positive multiple of num_kv_heads \(12\)"),
        (lambda: make(GROUPS, num_heads=8), r"must have 8 heads together, .* got \[2, 4\]"),
        (lambda: make([]), r"must have 6 heads together, .* got \[\]"),
        (
            lambda: make([{"name": "softmax", "num_heads": 3}] * 2, num_kv_heads=3),
            r"a multiple of 2, .* of a key head, got \[3, 3\]",
        ),
        (lambda: make([{"name": "sotfmax", "num_heads": 6}]), "unknown mechanism 'sotfmax'"),
        (lambda: make(window=3), "'softmax' has no option window"),
        (
            lambda: make([{"name": "softmax", "num_heads": 2}, {"name": "hyena", "num_heads": 4}]),
            "take head_dim, but the mixer of 'hyena' does not; use it alone in a layer",
        ),
        (lambda: config(mixer={"heads": [{"num_heads": 6}]}), 'mixer .* as "name"'),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
