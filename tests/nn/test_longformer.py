"""LongformerSelfAttention: windows with global tokens, at once and in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.nn import Alibi, LongformerSelfAttention, RotaryEmbedding
from tests.nn.build import filled, floats
from tests.nn.calls import call, extend

LENGTH = 12
GLOBAL = np.zeros((2, LENGTH), bool)
GLOBAL[0, [0, 5, 11]] = GLOBAL[1, [3, 4]] = True


def make(**options):
    options = {"local_window_size": (2, 0), "max_global": 3, "num_kv_heads": 2, **options}
    return LongformerSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)


def made(**options):
    """A module with random parameters, whose global projections differ from the others."""
    return filled(lambda: make(**options))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


def test_it_is_longformer_attention_between_projections():
    options = {"local_window_size": (2, 1), "is_causal": False, "use_bias": True}
    mixer = made(**options, global_projections=True)
    x = floats(2, LENGTH, 16)
    names = ("query", "key", "value", "global_query", "global_key", "global_value")
    heads = {}
    for name in names:
        layer = getattr(mixer, name)
        heads[name] = np.einsum("btd,dnh->btnh", x, layer.kernel[...]) + layer.bias[...]
    attention = functools.partial(
        effattn.longformer_attention, local_window_size=(2, 1), global_mask=GLOBAL, max_global=3
    )
    out = jax.jit(attention)(**heads)
    y = np.einsum("btnh,nhd->btd", out, mixer.out.kernel[...]) + mixer.out.bias[...]
    close(call(mixer, x, global_mask=GLOBAL), y)


@pytest.mark.slow
def test_global_projections_start_equal_to_the_others_and_are_learned_apart():
    shared, own = jax.jit(lambda: (make(), make(global_projections=True)))()
    x = floats(2, LENGTH, 16)
    close(call(own, x, global_mask=GLOBAL), call(shared, x, global_mask=GLOBAL))

    @jax.jit
    @jax.grad
    def gradient(mixer, x):
        return jnp.sum(mixer(x, global_mask=GLOBAL) ** 2)

    of_own = gradient(own, x)
    assert not np.allclose(of_own.key.kernel[...], of_own.global_key.kernel[...])
    assert np.any(of_own.global_query.kernel[...] != 0)


MIXERS = {
    "own, rotary": {"global_projections": True, "rotary": RotaryEmbedding(), "qk_norm": True},
    "alibi, dilated": {
        "global_projections": True,
        "score_mod": Alibi(4),
        "dilation": (2, 2, 1, 1),
        "logits_soft_cap": 2.0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_any_split_equals_the_whole(name):
    mixer = made(**MIXERS[name])
    x = floats(2, LENGTH, 16)
    whole = call(mixer, x, global_mask=GLOBAL)
    state, outs, start = mixer.init_state(2, LENGTH), [], 0
    for time in (4, 1, 1, 1, 1, 4):
        piece = slice(start, start + time)
        y, state = extend(mixer, x[:, piece], state, global_mask=GLOBAL[:, piece])
        outs.append(y)
        start += time
    close(np.concatenate(outs, 1), whole)


def test_unequal_prompts_continue_as_each_would_alone():
    mixer = made(**MIXERS["own, rotary"], score_mod=Alibi(4))
    x = floats(2, LENGTH, 16)
    lengths = np.array([7, 2])
    rows = np.arange(2)[:, None]
    whole = call(mixer, x, global_mask=GLOBAL)
    prompt = np.where(np.arange(7)[:, None] < lengths[:, None, None], x[:, :7], np.nan)
    # The mask marks padding as global too, which must have no effect.
    mask = GLOBAL[:, :7] | (np.arange(7) >= lengths[:, None])
    state = mixer.init_state(2, LENGTH)
    first, state = extend(mixer, prompt, state, lengths, global_mask=mask)
    after = lengths[:, None] + np.arange(5)
    # The padding makes these tokens as many as the prompts, so the program is the same.
    rest = np.concatenate([x[rows, after], np.full_like(x[:, :2], np.nan)], 1)
    mask = np.concatenate([GLOBAL[rows, after], GLOBAL[:, :2]], 1)
    second, state = extend(mixer, rest, state, np.array([5, 5]), global_mask=mask)
    for row, length in enumerate(lengths):
        close(first[row, :length], whole[row, :length])
    close(second[:, :5], whole[rows, after])
    np.testing.assert_array_equal(state.length, lengths + 5)


def test_more_global_tokens_than_there_is_room_for():
    mixer = made(max_global=2)
    x = floats(2, LENGTH, 16)
    whole = call(mixer, x, global_mask=GLOBAL)
    first = GLOBAL & (np.cumsum(GLOBAL, -1) <= 2)
    close(whole, call(mixer, x, global_mask=first))
    state, outs = mixer.init_state(2, LENGTH), []
    for piece in (slice(0, 6), slice(6, 12)):
        y, state = extend(mixer, x[:, piece], state, global_mask=GLOBAL[:, piece])
        outs.append(y)
    close(np.concatenate(outs, 1), whole)


def test_a_step_of_a_token_that_is_not_global_does_not_read_the_prefix():
    """The operations of a step do not grow with the capacity of the cache."""
    mixer = made(global_projections=True)

    def flops(capacity):
        state = jax.eval_shape(lambda: mixer.init_state(2, capacity))
        step = jax.jit(lambda x, state: mixer.extend(x, state))
        cost = step.lower(floats(2, 1, 16), state).compile().cost_analysis()
        return cost["flops"]

    assert flops(4096) == flops(64)


@pytest.mark.slow
def test_without_global_tokens_it_is_a_window_that_decodes_as_one():
    x = floats(2, LENGTH, 16)
    plain, with_room = made(max_global=None), made()
    close(call(with_room, x, global_mask=np.zeros_like(GLOBAL)), call(plain, x))
    state = plain.init_state(2, 10**6)
    assert state.key.shape == (2, 2, 2, 4)
    y, _ = extend(with_room, x, with_room.init_state(2, LENGTH))
    close(y, extend(plain, x, state)[0])


LEADING = {
    "causal": {"global_tokens": 3, "max_global": None},
    "own projections, rotary": {
        "global_tokens": 3,
        "max_global": None,
        "global_projections": True,
        "rotary": RotaryEmbedding(),
    },
    "packed, bidirectional": {"global_tokens": 2, "max_global": 6, "is_causal": False},
    "named, bidirectional": {"global_tokens": [4, 1], "max_global": 6, "is_causal": False},
}


@pytest.mark.parametrize("name", LEADING)
def test_tokens_at_these_positions_of_each_document_are_global(name):
    mixer = made(**LEADING[name])
    none = {"global_tokens": 0}
    masked = made(**{**LEADING[name], **none, "max_global": mixer.max_global or 3})
    x, is_global = floats(2, LENGTH, 16), np.isin(np.arange(LENGTH), mixer.global_tokens)
    close(call(mixer, x), call(masked, x, global_mask=np.tile(is_global, (2, 1))))
    if mixer.max_global is None:
        with pytest.raises(ValueError, match="segment_ids with global_tokens need max_global"):
            call(mixer, x, segment_ids=np.ones((2, LENGTH), int))
        return
    ids = np.tile(np.repeat([1, 2, 0], (5, 6, 1)), (2, 1))
    packed = call(mixer, np.where(ids[..., None] > 0, x, np.nan), segment_ids=ids)
    close(packed[:, :5], call(mixer, x[:, :5]))
    close(packed[:, 5:11], call(mixer, x[:, 5:11]))


@pytest.mark.parametrize("name", [n for n in LEADING if "bidirectional" not in n])
def test_decoding_with_leading_global_tokens_keeps_no_other_prefix(name):
    mixer = made(**LEADING[name])
    x, lengths = floats(2, LENGTH, 16), np.array([2, 5])
    rows = np.arange(2)[:, None]
    whole = call(mixer, x)
    state = mixer.init_state(2, 10**6)
    assert max(max(leaf.shape) for leaf in jax.tree.leaves(state)) < 10
    prompt = np.where(np.arange(5)[:, None] < lengths[:, None, None], x[:, :5], np.nan)
    first, state = extend(mixer, prompt, state, lengths)
    after = lengths[:, None] + np.arange(5)
    second, state = extend(mixer, x[rows, after], state, np.array([5, 5]))
    third, _ = extend(mixer, x[rows, lengths[:, None] + 5], state)
    for row, length in enumerate(lengths):
        close(first[row, :length], whole[row, :length])
    close(second, whole[rows, after])
    close(third, whole[rows, lengths[:, None] + 5])


def test_a_model_reads_its_first_tokens_from_beyond_the_window():
    """The last token depends on the global tokens, and on no other token outside of its window."""

    def gradients(**options):
        mixer = made(local_window_size=(2, 0), **options)

        def last(x):
            return jnp.abs(mixer(x)[:, -1]).sum()

        return np.abs(jax.jit(jax.grad(last))(floats(1, LENGTH, 16)))[0].sum(-1)

    at = np.arange(LENGTH)
    window, with_global = gradients(max_global=None), gradients(max_global=None, global_tokens=2)
    np.testing.assert_array_equal(window > 0, at >= LENGTH - 3)
    np.testing.assert_array_equal(with_global > 0, (at >= LENGTH - 3) | (at < 2))


def test_the_registry_builds_it():
    build = registry.get("longformer").build
    mixer = filled(lambda: build(16, 4, max_global=2, rngs=nnx.Rngs(0)))
    assert isinstance(mixer, LongformerSelfAttention)
    assert dict(mixer.options)["local_window_size"] == 127


@pytest.mark.slow
def test_padding_and_other_documents_reach_nothing():
    mixer = made(local_window_size=3, is_causal=False)
    x = floats(2, LENGTH, 16)
    first, second = (
        call(mixer, x[:, piece], global_mask=GLOBAL[:, piece])
        for piece in (slice(0, 6), slice(6, 12))
    )
    padded, lengths = x.copy(), np.array([6, 12])
    padded[0, 6:] = np.nan
    y = call(mixer, padded, lengths, np.ones((2, LENGTH), int), global_mask=GLOBAL)
    close(y[0, :6], first[0])
    ids = np.tile(np.repeat([1, 2], 6), (2, 1))
    y = call(mixer, x, np.array([LENGTH, LENGTH]), ids, global_mask=GLOBAL)
    close(y, np.concatenate([first, second], 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_global": 0}, "max_global must be an int, 1 or more, or None, got 0"),
        ({"max_global": None, "global_projections": True}, "global_projections=True needs global"),
        ({"global_tokens": -1}, "global_tokens must be an int, 0 or more tokens, got -1"),
        (
            {"global_tokens": 4},
            "max_global=3, .* must be at least .* global_tokens of a document, got 4",
        ),
        ({"global_tokens": ()}, r"a number of tokens, or one or more positions, .* got \(\)"),
        ({"global_tokens": (0, -2)}, r"positions, ints from 0, got \(0, -2\)"),
        ({"global_tokens": 1.5}, "global_tokens must be a number of tokens, .* got 1.5"),
        ({"global_mask": GLOBAL}, "no option global_mask; the argument global_mask of each call"),
        ({"stride": 2}, "no option stride"),
        ({"dilation": (1, 2, 1, 2)}, "must be the same for the 2 query heads"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)(floats(2, LENGTH, 16))


def test_wrong_global_masks_are_named():
    x = floats(2, LENGTH, 16)
    with pytest.raises(ValueError, match="global_mask needs max_global"):
        made(max_global=None)(x, global_mask=GLOBAL)
    with pytest.raises(
        ValueError, match="global_mask must be None with global_tokens, .* the positions 0, 1;"
    ):
        made(global_tokens=2)(x, global_mask=GLOBAL)
    with pytest.raises(ValueError, match=r"bool of shape \(2, 12\), got int"):
        made()(x, global_mask=GLOBAL.astype(int))
    with pytest.raises(ValueError, match=r"shape \(2, 12\), got bool of shape \(1, 12\)"):
        made()(x, global_mask=GLOBAL[:1])
    mixer = made()
    with pytest.raises(ValueError, match=r"shape \(2, 1\), got bool of shape \(2, 12\)"):
        mixer.extend(x[:, :1], mixer.init_state(2, 4), global_mask=GLOBAL)
