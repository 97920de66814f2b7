"""IndexedSelfAttention: the loss of its index, and refused arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effattn import registry
from effattn.nn import IndexedSelfAttention, RotaryEmbedding
from effattn.testing.subjects import filled_at_random

INDEX = ("index_key", "index_norm", "index_query", "index_weights")


def made(**options):
    options = {"num_kv_heads": 2, "top_k": 4, "index_heads": 2, **options}
    return filled_at_random(lambda: IndexedSelfAttention(16, 4, rngs=nnx.Rngs(0), **options))


def tokens(time=13):
    return np.random.default_rng(0).normal(size=(2, time, 16)).astype(np.float32)


def divergence(mixer, x, top_k):
    """The loss of one example by all pairs."""
    project = lambda layer: np.einsum("td,dnh->nth", x, layer.kernel[...])  # noqa: E731
    query, key = project(mixer.query), np.repeat(project(mixer.key), 2, 0)
    index = mixer._index(x[None], None)
    products = np.maximum(np.einsum("tae,se->tas", index.query[0], index.key[0]), 0)
    scores = np.einsum("ta,tas->ts", index.weights[0], products)
    losses = []
    for t in range(len(x)):
        seen = sorted(range(t + 1), key=lambda s: (-scores[t, s], s))[:top_k]
        logits = np.einsum("nh,nsh->ns", query[:, t], key[:, seen]) / query.shape[-1] ** 0.5
        p = np.asarray(jax.nn.softmax(logits)).mean(0)
        q = np.asarray(jax.nn.softmax(scores[t, seen]))
        losses.append((p * np.log(p / q)).sum())
    return losses


@pytest.mark.parametrize("top_k", [4, 13])
def test_the_loss_is_the_divergence_from_the_attention_weights(top_k):
    mixer, x = made(top_k=top_k), tokens()
    expected = np.mean([divergence(mixer, row, top_k) for row in x])
    found = jax.jit(lambda mixer, x: mixer.index_loss(x))(mixer, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_padding_and_documents_have_the_loss_of_each_alone():
    mixer, x = made(), tokens()
    alone = [divergence(mixer, part, 4) for part in (x[0, :7], x[1, :4], x[1, 4:13])]
    loss = jax.jit(lambda mixer, x, **padding: mixer.index_loss(x, **padding))
    padded = loss(mixer, np.where(np.arange(13)[:, None] < 7, x, np.nan)[:1], lengths=np.array([7]))
    np.testing.assert_allclose(padded, np.mean(alone[0]), rtol=1e-4)
    ids = np.repeat([[1, 2]], [4, 9], axis=1)
    packed = loss(mixer, x[1:], segment_ids=ids)
    np.testing.assert_allclose(packed, np.mean(alone[1] + alone[2]), rtol=1e-4)


def test_the_loss_trains_the_index_alone_and_the_output_all_else():
    mixer, x = made(), tokens()
    of_loss = jax.jit(nnx.grad(lambda mixer: mixer.index_loss(x)))(mixer)
    of_output = jax.jit(nnx.grad(lambda mixer: (mixer(x) ** 2).sum()))(mixer)
    for (path, first), second in zip(
        jax.tree.leaves_with_path(of_loss), jax.tree.leaves(of_output), strict=True
    ):
        name = jax.tree_util.keystr(path)
        is_of_index = any(part in name for part in INDEX)
        assert np.any(first) == is_of_index, name
        assert np.any(second) != is_of_index, name


def test_training_brings_the_index_to_the_attention():
    mixer, x = made(top_k=13), tokens()
    optimizer = nnx.Optimizer(mixer, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(mixer, optimizer):
        loss, gradients = nnx.value_and_grad(lambda mixer: mixer.index_loss(x))(mixer)
        optimizer.update(mixer, gradients)
        return loss

    losses = [step(mixer, optimizer) for _ in range(60)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be an int, 1 or more keys of a query, got 0"),
        ({"index_heads": 0}, "index_heads must be an int, 1 or more, got 0"),
        ({"index_dim": 0}, "index_dim must be an int, 1 or more features, got 0"),
        ({"index_dim": 3, "rotary": RotaryEmbedding()}, "rotary needs an even index_dim, got 3"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"is_causal": False}, "'indexed' lacks 'bidirectional'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        registry.get("indexed").build(16, 4, rngs=nnx.Rngs(0), **options)


def test_the_loss_of_no_tokens_is_refused():
    mixer = jax.eval_shape(lambda: IndexedSelfAttention(8, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"x must have at least one token, got shape \(1, 0, 8\)"):
        mixer.index_loss(jnp.zeros((1, 0, 8)))


def test_a_selection_of_all_keys_is_exact_attention():
    mixer, x = made(top_k=13), tokens()
    query = jnp.einsum("btd,dnh->btnh", x, mixer.query.kernel[...])
    key, value = (
        jnp.einsum("btd,dnh->btnh", x, layer.kernel[...]) for layer in (mixer.key, mixer.value)
    )
    exact = mixer.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))
    np.testing.assert_allclose(mixer(x), exact, rtol=1e-4, atol=1e-5)
