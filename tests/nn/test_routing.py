"""RoutingSelfAttention: heads side by side, and centroids that a method moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.arrays.norms import layer_norm
from effattn.nn import RotaryEmbedding, RoutingSelfAttention, TransformerConfig, TransformerLM
from tests.marks import slow
from tests.nn.build import filled, floats

X = floats(2, 11, 16)


def make(**options):
    options = {"num_clusters": 3, "cluster_size": 4, "local_window_size": 2, **options}
    return RoutingSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)


def made(**options):
    """A module with random parameters and centroids in place of its initial values."""
    return filled(lambda: make(**options))


call = jax.jit(lambda mixer, x: mixer(x))


@functools.partial(jax.jit, static_argnames="decay")
def updated(mixer, x, decay, **padding):
    """The centroids after an update."""
    mixer.update_centroids(x, decay=decay, **padding)
    return mixer.centroids[...]


def heads_of(mixer, x):
    layers = mixer.query, mixer.key, mixer.value
    return tuple(np.einsum("btd,dnh->btnh", x, layer.kernel[...]) for layer in layers)


@pytest.mark.parametrize("is_causal", [False, slow(True)])
def test_it_is_both_kinds_of_attention_between_projections(is_causal):
    mixer = made(is_causal=is_causal, num_kv_heads=2)
    assert mixer.num_local_heads == 2 and mixer.centroids[...].shape == (2, 3, 4)

    @jax.jit
    def sides(query, key, value):
        near = effattn.sliding_window_attention(
            query[:, :, :2],
            key[:, :, :1],
            value[:, :, :1],
            local_window_size=(2, 0 if is_causal else 2),
            is_causal=is_causal,
        )
        far = effattn.routing_attention(
            query[:, :, 2:],
            key[:, :, 1:],
            value[:, :, 1:],
            centroids=mixer.centroids[...],
            cluster_size=4,
            is_causal=is_causal,
        )
        return jnp.concatenate([near, far], 2)

    y = np.einsum("btnh,nhd->btd", sides(*heads_of(mixer, X)), mixer.out.kernel[...])
    np.testing.assert_allclose(call(mixer, X), y, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("local", [0, 1, 3])
def test_decoding_is_what_training_saw(local):
    """Decoding is in pieces longer than a cluster, and by single tokens."""
    mixer = made(num_local_heads=local, rotary=RotaryEmbedding())
    extend = jax.jit(lambda mixer, piece, state: mixer.extend(piece, state))
    state, parts = mixer.init_state(2, 11), []
    for piece in (X[:, :5], X[:, 5:6], X[:, 6:]):
        y, state = extend(mixer, piece, state)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, 1), call(mixer, X), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state.length, [11, 11])


def test_a_large_cluster_takes_short_inputs():
    mixer, exact = made(cluster_size=64), made(cluster_size=11)
    np.testing.assert_array_equal(call(mixer, X), call(exact, X))


def test_the_centroids_are_not_trained():
    _, trained, rest = nnx.split(made(), nnx.Param, ...)
    assert [path[0] for path, _ in nnx.to_flat_state(rest)] == ["centroids"]
    assert "centroids" not in trained


normalised = jax.jit(functools.partial(layer_norm, epsilon=1e-6))


def nearest_means(vectors, centroids):
    """The mean of the nearest vectors for each head and cluster, or None, computed by loops."""
    heads, clusters, _ = centroids.shape
    of_head = [np.concatenate([u[:, :, n] for u in vectors]).reshape(-1, 4) for n in range(heads)]
    which = [np.argmax(u @ c.T, -1) for u, c in zip(of_head, centroids, strict=True)]
    return [
        [u[w == c].mean(0) if (w == c).any() else None for c in range(clusters)]
        for u, w in zip(of_head, which, strict=True)
    ]


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_centroid_moves_towards_the_mean_of_what_is_nearest(is_causal):
    mixer = made(is_causal=is_causal, num_clusters=9)
    before = mixer.centroids[...]
    query, key, _ = (np.asarray(normalised(x[:, :, 2:])) for x in heads_of(mixer, X))
    means = nearest_means([(query + key) / 2] if is_causal else [query, key], before)
    after = np.asarray(updated(mixer, X, 0.75))
    for n, of_head in enumerate(means):
        for c, mean in enumerate(of_head):
            if mean is None:
                np.testing.assert_array_equal(after[n, c], before[n, c])
                continue
            moved = 0.75 * before[n, c] + 0.25 * mean
            expected = moved / np.sqrt(np.square(moved).mean())
            np.testing.assert_allclose(after[n, c], expected, rtol=1e-5, atol=1e-5)


def test_padding_moves_nothing():
    mixer, padded = made(), X.copy()
    padded[:, 7:] = np.nan
    ids = np.tile(np.arange(11) < 7, (2, 1)).astype(int)
    alone = updated(mixer, X[:, :7], 0.5)
    for padding in ({"lengths": np.array([7, 7])}, {"segment_ids": ids}):
        np.testing.assert_allclose(updated(mixer, padded, 0.5, **padding), alone, rtol=1e-5)


def test_devices_move_them_together():
    """Each device reads its own examples, and all devices move the centroids together."""
    mixer = made()

    def of_part(mixer, x):
        mixer.update_centroids(x, decay=0.5, axis_name="parts")
        return mixer.centroids[...]

    found = jax.jit(jax.vmap(of_part, (None, 0), axis_name="parts"))(mixer, X[:, None])
    for part in found:
        np.testing.assert_allclose(part, updated(mixer, X, 0.5), rtol=1e-5, atol=1e-6)


ROUTING = {"name": "routing", "num_clusters": 3, "cluster_size": 4}


@pytest.mark.parametrize(
    ("mixer", "half"),
    [
        (ROUTING, False),
        slow({"heads": ({**ROUTING, "num_heads": 2}, {"name": "softmax", "num_heads": 2})}, False),
        slow({"name": "mixture_of_mechanisms", "mechanisms": ("linear", ROUTING)}, False),
        slow({"name": "convolution_attention", "attention": ROUTING}, True),
    ],
    ids=["routing", "heads", "mixture", "half"],
)
def test_a_model_moves_those_of_its_layers(mixer, half):
    """Each mixer uses its own input without padding; no other part of the model changes."""
    config = TransformerConfig(
        vocab_size=7, num_layers=2, features=16, num_heads=4, mixer=("linear", mixer)
    )
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(2).integers(0, 7, (2, 11))
    lengths = np.array([11, 6])

    def moved(model):
        model.update_centroids(tokens, lengths=lengths, decay=0.5)
        return nnx.state(model)

    def expected(model):
        first, second = model.blocks
        read = second.mixer_norm(first(model.embed(tokens), lengths=lengths))
        (routing,) = (m for _, m in nnx.iter_modules(second) if type(m) is RoutingSelfAttention)
        routing.update_centroids(read[..., :8] if half else read, lengths=lengths, decay=0.5)
        return nnx.state(model)

    # Each model has its own variables, and one program compiles their common parts.
    both = jax.jit(lambda *models: (moved(models[0]), expected(models[1])))
    states = nnx.state(model), *both(model, model)
    before, after, wanted = (dict(nnx.to_flat_state(state)) for state in states)
    for path, value in after.items():
        np.testing.assert_allclose(value[...], wanted[path][...], rtol=1e-5, atol=1e-6)
    changed = [path[-1] for path in after if np.any(after[path][...] != before[path][...])]
    assert changed == ["centroids"]


def test_k_means_finds_groups():
    """Tokens of three kinds give each kind its own centroid."""
    mixer = made(num_local_heads=3, num_clusters=3)
    kinds = 4 * floats(3, 16, seed=1)  # the projections keep the kinds apart
    x = kinds[np.arange(12) % 3][None] + 0.01 * floats(1, 12, 16, seed=6)
    query, key, _ = heads_of(mixer, kinds[None])
    ideal = np.asarray((normalised(query) + normalised(key)) / 2)[0, :, 3]
    mixer.centroids[...] = ideal[None] + 0.3
    for _ in range(20):
        mixer.centroids[...] = updated(mixer, x, 0.5)
    aligned = np.einsum("ch,ch->c", mixer.centroids[...][0], ideal)
    norms = np.linalg.norm(ideal, axis=-1) * 2
    np.testing.assert_allclose(aligned / norms, 1, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_local_heads": 4}, "num_local_heads must be less than num_heads 4, .* got 4"),
        (
            {"num_local_heads": 1, "num_kv_heads": 2},
            "a multiple of 2, the number of query heads of",
        ),
        ({"centroids": np.ones((4, 3, 4))}, "has no option centroids"),
        ({"num_clusters": 0}, "num_clusters must be an int, 1 or more clusters, got 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_a_causal_input_may_be_shorter():
    """A short input gives the first outputs of a longer input."""
    mixer = made()
    np.testing.assert_allclose(call(mixer, X[:, :2]), call(mixer, X)[:, :2], rtol=1e-5, atol=1e-6)


def test_fewer_tokens_than_clusters_are_refused():
    with pytest.raises(ValueError, match="must be at most 2, the number of tokens, got 3"):
        made(is_causal=False)(X[:, :2])


def test_a_decay_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"decay must be a number in \[0, 1\], got 2"):
        made().update_centroids(X, decay=2)
