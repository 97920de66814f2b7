"""Talking-heads attention beyond the laws: its limit, the paper's sums, wrong arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.analysis import cost
from effattn.nn import RotaryEmbedding, TalkingHeadsAttention

X = jnp.ones((1, 3, 2, 4))
EYE = jnp.eye(2)
RNG = np.random.default_rng(0)


def test_with_the_identity_it_is_softmax_attention():
    query, key, value = RNG.normal(size=(3, 2, 9, 4, 6)).astype(np.float32)
    key, value = key[:, :, :2], value[:, :, :2]
    options = {"is_causal": True, "local_window_size": (5, 0)}
    attend = functools.partial(effattn.talking_heads_attention, query_tile=4, **options)
    exact = jax.jit(functools.partial(effattn.dot_product_attention, **options))
    mixes = {"logits_mix": np.eye(4, dtype=np.float32), "weights_mix": np.eye(4, dtype=np.float32)}
    found = jax.jit(attend)(query, key, value, **mixes)
    np.testing.assert_allclose(found, exact(query, key, value), atol=1e-6)


def test_the_sums_of_the_paper():
    """Heads of queries and keys n, softmaxes m and heads of values l, in NumPy."""
    query, key, value = RNG.normal(size=(3, 1, 7, 3, 4))
    before, after = RNG.normal(size=(3, 5)), RNG.normal(size=(5, 3))
    logits = np.einsum("btnh,bsnh->bnts", query, key) / 2
    mixed = np.exp(np.einsum("bnts,nm->bmts", logits, before))
    weights = mixed / mixed.sum(-1, keepdims=True)
    expected = np.einsum("bmts,ml,bslv->btlv", weights, after, value)
    with jax.enable_x64(True):
        found = jax.jit(effattn.talking_heads_attention)(
            query, key, value, logits_mix=before, weights_mix=after
        )
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"query_seq_lengths": [7, 2], "key_value_seq_lengths": [5, 0]},
        {"segment_ids": np.array([[2, 2, 1, 1, 1, 0, 0], [1] * 7]), "is_causal": True},
        {"query_offset": np.array([-2, 3]), "is_causal": True},
        {"local_window_size": (2, 1), "scale": 0.3},
    ],
    ids=" ".join,
)
def test_options_agree_with_the_naive_form(options):
    query, key, value = RNG.normal(size=(3, 2, 7, 4, 6))
    arrays = query, key[:, :, :2], value[:, :, :2], *RNG.normal(size=(2, 4, 4))

    def run(implementation, *arrays):
        *heads, before, after = arrays
        return effattn.talking_heads_attention(
            *heads,
            logits_mix=before,
            weights_mix=after,
            implementation=implementation,
            **options,
        )

    @functools.partial(jax.jit, static_argnums=0)
    def both(implementation, arrays):
        out, pull_back = jax.vjp(lambda arrays: run(implementation, *arrays), arrays)
        return out, pull_back(jnp.cos(out))

    with jax.enable_x64(True):
        found, right = both(None, arrays), both("naive", arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), found, right)


def test_memory_is_linear_in_the_length():
    def bytes_at(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        mixes = {"logits_mix": EYE, "weights_mix": EYE, "query_tile": 8}
        attend = functools.partial(effattn.talking_heads_attention, **mixes)
        program = jax.jit(jax.grad(lambda x: attend(x, x, x).sum()))
        return cost.temporary_bytes(program.trace(x))

    assert bytes_at(2048) < 2.5 * bytes_at(1024)
    assert bytes_at(2048) < 2048**2


@pytest.mark.parametrize(
    ("mixes", "message"),
    [
        ((jnp.ones((3, 2)), EYE), r"logits_mix must be floating point of shape \(2, 2\), got"),
        ((jnp.ones((2, 3)), EYE), r"weights_mix must be floating point of shape \(3, 2\), got"),
        ((jnp.ones(()), EYE), r"logits_mix must be floating point of shape \(2, 1\)"),
    ],
)
def test_wrong_arguments_are_named(mixes, message):
    with pytest.raises(ValueError, match=message):
        effattn.talking_heads_attention(X, X, X, logits_mix=mixes[0], weights_mix=mixes[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_softmaxes": 0}, "num_softmaxes must be an int, 1 or more"),
        ({"num_kv_heads": 3}, r"num_heads \(2\) must be a positive multiple of num_kv_heads"),
        ({"rotary": 1}, "rotary must be a RotaryEmbedding or None, got 1"),
        ({"rotary": RotaryEmbedding(features=6)}, "rotary rotates 6 features, but head_dim is"),
        ({"rotary": RotaryEmbedding(), "head_dim": 3}, "rotary needs an even head_dim, got 3"),
    ],
)
def test_wrong_options_of_layers_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TalkingHeadsAttention(8, 2, **options, rngs=nnx.Rngs(0))
