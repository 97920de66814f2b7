"""Infini-attention: the paper's loop over segments, its limits, the parts of its module."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import InfiniSelfAttention, RotaryEmbedding
from tests.nn.build import floats

SEGMENT = 4


def features(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def by_segments(query, key, value, gate, delta_rule):
    """Equations 2 to 10 of the paper for one head, a segment at a time."""
    memory, z, outputs = np.zeros((query.shape[1], value.shape[1])), 0, []
    share = 1 / (1 + np.exp(-gate))
    for start in range(0, len(query), SEGMENT):
        q, k, v = (x[start : start + SEGMENT] for x in (query, key, value))
        logits = np.where(np.tri(len(q), dtype=bool), q @ k.T / q.shape[1] ** 0.5, -np.inf)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        local = weights / weights.sum(1, keepdims=True) @ v
        read, update = np.zeros_like(local), v
        if start:
            read = features(q) @ memory / (features(q) @ z)[:, None]
            if delta_rule:
                update = v - features(k) @ memory / (features(k) @ z)[:, None]
        memory, z = memory + features(k).T @ update, z + features(k).sum(0)
        outputs.append(share * read + (1 - share) * local)
    return np.concatenate(outputs)


@pytest.mark.parametrize("delta_rule", [True, False])
def test_it_is_the_loop_over_segments_of_the_paper(delta_rule):
    query, key, value = (floats(14, 2, 5, seed=seed) for seed in range(3))
    gate = np.array([-0.5, 1.0], np.float32)
    expected = np.stack(
        [
            by_segments(*(x[:, n].astype(np.float64) for x in (query, key, value)), g, delta_rule)
            for n, g in enumerate(gate)
        ],
        1,
    )
    attend = functools.partial(effattn.infini_attention, segment_size=SEGMENT)
    out = jax.jit(functools.partial(attend, gate=gate, delta_rule=delta_rule))(query, key, value)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_a_closed_gate_gives_attention_within_segments():
    query, key, value = (floats(1, 11, 2, 4, seed=seed) for seed in range(3))
    attend = functools.partial(effattn.infini_attention, gate=-jnp.inf, segment_size=SEGMENT)
    ids = 1 + np.arange(11)[None] // SEGMENT
    within = functools.partial(effattn.dot_product_attention, is_causal=True, segment_ids=ids)
    out, local = jax.jit(lambda *x: (attend(*x), within(*x)))(query, key, value)
    np.testing.assert_allclose(out, local, atol=1e-6)


@pytest.mark.slow
def test_documents_may_start_anywhere_and_be_short():
    """Documents of one token, and of more than two segments, that do not fill tiles."""
    query, key, value = (floats(1, 21, 1, 4, seed=seed) for seed in range(3))
    options = {"gate": jnp.zeros(1), "segment_size": SEGMENT, "delta_rule": True}
    options["segment_ids"] = np.repeat(np.arange(1, 6), [1, 1, 3, 11, 5])[None]

    @jax.jit
    def run(*x):
        return tuple(f(*x, **options) for f in (effattn.infini_attention, effattn.naive.infini))

    packed, right = run(query, key, value)
    np.testing.assert_allclose(packed, right, atol=1e-5)


def test_the_memory_knows_no_positions():
    """Where gates take the memory alone, the rotary embedding changes nothing."""
    layer = InfiniSelfAttention(8, 2, segment_size=3, rotary=RotaryEmbedding(), rngs=nnx.Rngs(0))
    plain = InfiniSelfAttention(8, 2, segment_size=3, rngs=nnx.Rngs(0))
    x = floats(1, 9, 8)
    for gate, is_equal in ((1e4, True), (0.0, False)):
        for mixer in (layer, plain):
            mixer.gate[...] = jnp.full(2, gate)
        assert np.allclose(nnx.jit(layer)(x), nnx.jit(plain)(x), atol=1e-6) == is_equal


def test_the_state_has_a_segment_and_a_memory():
    layer = InfiniSelfAttention(8, 2, segment_size=5, rngs=nnx.Rngs(0))
    state = jax.eval_shape(lambda: layer.init_state(3, 1000, jnp.bfloat16))
    assert state.tokens.key.shape == (3, 4, 2, 4) and state.tokens.key.dtype == jnp.bfloat16
    assert state.memory.whole.shape == (3, 2, 4, 5) and state.memory.whole.dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_size": 0}, "segment_size must be an int, 1 or more tokens, got 0"),
        ({"gate": jnp.ones(3)}, r"gate must be floating point of shape \(2,\)"),
        ({"rotary": 3}, r"rotary must be a function \(x, positions\), got 3"),
        (
            {"rotary": lambda x, positions: x[:, :1]},
            r"rotary\(query\) must be floating .* \(1, 6, 2, 4\), got .* \(1, 1, 2, 4\)",
        ),
        ({"segment_ids": (np.ones((1, 6), int),) * 2}, "segment_ids must be one array .* a pair"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    x = np.ones((1, 6, 2, 4), np.float32)
    options = {"segment_size": SEGMENT, "gate": jnp.zeros(2), **options}
    with pytest.raises(ValueError, match=message):
        effattn.infini_attention(x, x, x, **options)


def test_the_layer_learns_its_gate():
    with pytest.raises(ValueError, match="it learns the gate of each head"):
        InfiniSelfAttention(8, 2, gate=0.0, segment_size=4, rngs=nnx.Rngs(0))
