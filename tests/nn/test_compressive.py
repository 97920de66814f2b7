"""The Compressive Transformer: the paper's queues of memories, its loss, its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import CompressiveAttention
from tests.nn.build import filled, floats

SEGMENT, MEMORY, SLOTS, RATE = 4, 6, 3, 2


def make(**options):
    sizes = {"segment_size": SEGMENT, "memory_size": MEMORY, "num_slots": SLOTS}
    options = {**sizes, "compression_rate": RATE, **options}
    return CompressiveAttention(8, 2, rngs=nnx.Rngs(0), **options)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def parameters(mixer):
    layers = ("query", "key", "value", "distance", "out")
    kernels = [np.asarray(getattr(mixer, name).kernel[...], np.float64) for name in layers]
    others = (mixer.content_bias, mixer.position_bias, mixer.kernel)
    return *kernels, *(np.asarray(x[...], np.float64) for x in others)


def heads(x, kernel):
    return np.einsum("td,dnh->tnh", x, kernel)


def by_segments(mixer, x):
    """Algorithms 1 and 2 of the paper for one row: outputs, and the errors of the compression."""
    query, key, value, distance, out, u, v, conv = parameters(mixer)
    frequency = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    memory, slots, outputs, errors = np.zeros((0, 8)), np.zeros((0, 8)), [], []
    for start in range(0, len(x), SEGMENT):
        segment = x[start : start + SEGMENT]
        extended = np.concatenate([slots[-SLOTS:], memory, segment])
        q, k, values = heads(segment, query), heads(extended, key), heads(extended, value)
        for t in range(len(segment)):
            here = len(extended) - len(segment) + t
            logits = []
            for j in range(here + 1):
                angle = (here - j) * frequency
                wave = np.stack([np.sin(angle), np.cos(angle)], -1).ravel()
                r = np.einsum("d,dnh->nh", wave, distance)
                logits.append(((q[t] + u) * k[j] + (q[t] + v) * r).sum(-1) / 2)
            y = np.einsum("ns,snh->nh", softmax(np.stack(logits, -1)), values[: here + 1])
            outputs.append(np.einsum("nh,nhd->d", y, out))
        memory = np.concatenate([memory, segment])
        old, memory = memory[:-MEMORY], memory[-MEMORY:]
        new = np.einsum("mcd,cde->me", old.reshape(-1, RATE, 8), conv) if len(old) else old
        slots = np.concatenate([slots, new])
        if len(old):
            read = [
                np.einsum(
                    "nts,snh->tnh",
                    softmax(np.einsum("tnh,snh->nts", q, heads(tokens, key)) / 2),
                    heads(tokens, value),
                )
                for tokens in (old, new)
            ]
            errors.extend(((read[0] - read[1]) ** 2).mean((1, 2)))
    return np.stack(outputs), np.mean(errors)


def test_it_is_the_queues_of_the_paper():
    mixer, x = filled(make), floats(1, 24, 8)
    outputs, loss = by_segments(mixer, x[0].astype(np.float64))
    run = jax.jit(lambda m, x: (m(x)[0], m.compression_loss(x)))
    found, found_loss = run(mixer, x)
    np.testing.assert_allclose(found, outputs, atol=1e-5)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)


def test_the_loss_alone_trains_the_convolution():
    mixer, x = filled(make), floats(1, 16, 8)
    losses = (lambda m: m.compression_loss(x)), (lambda m: jnp.sum(m(x) ** 2))
    of_compression, of_outputs = jax.jit(lambda m: [jax.grad(loss)(m) for loss in losses])(mixer)
    assert np.any(of_compression.kernel[...]) and not np.any(of_outputs.kernel[...])
    others = [of_compression.query, of_compression.key, of_compression.value]
    assert not any(np.any(layer.kernel[...]) for layer in others)


@pytest.mark.slow
def test_the_loss_leaves_out_padding_and_counts_documents():
    mixer, x = filled(make), floats(1, 24, 8)
    loss = jax.jit(lambda m, x, **padding: m.compression_loss(x, **padding))
    ids = np.repeat([1, 2, 0], [3, 17, 4])[None]
    alone = loss(mixer, np.pad(x[:, 3:20], ((0, 0), (0, 7), (0, 0)), constant_values=np.nan),
                 lengths=np.array([17]))  # fmt: skip
    np.testing.assert_allclose(loss(mixer, x, segment_ids=ids), alone, rtol=1e-5)
    assert jax.eval_shape(loss, mixer, x[:, :0]).shape == ()


def test_the_state_has_a_constant_size():
    mixer = jax.eval_shape(make)
    state = jax.eval_shape(lambda: mixer.init_state(3, 10**6))
    assert state.tokens.key.shape == (3, SEGMENT + MEMORY - 1, 2, 4)
    assert state.slots.value.shape == (3, SLOTS + (SEGMENT + MEMORY) // RATE, 2, 4)
    assert state.inputs.shape == (3, RATE - 1, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots must be an int, 1 or more slots, got 0"),
        ({"compression_rate": 1}, "compression_rate must be an int, 2 or more tokens, got 1"),
        ({"segment_size": 5}, "segment_size must be a multiple of compression_rate=2, got 5"),
        ({"memory_size": 3}, "memory_size must be a multiple of compression_rate=2, got 3"),
        ({"compression": "sum"}, "compression must be one of mean, max, convolution, got 'sum'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: make(**options))
