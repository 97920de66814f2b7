"""StreamingSelfAttention: positions in the cache, at once and in steps, and refused options."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import RotaryEmbedding, StreamingSelfAttention
from tests.nn.build import filled, floats

SINKS, WINDOW, LENGTH = 2, 4, 17
ROTARY = RotaryEmbedding(theta=30.0)


def make(**options):
    options = {"num_sinks": SINKS, "window_size": WINDOW, "positions_in_cache": True, **options}
    options = {"num_kv_heads": 1, "rotary": ROTARY, **options}
    return StreamingSelfAttention(16, 2, rngs=nnx.Rngs(0), **options)


def turned(x, position):
    """The rotation of x `(..., H)` as complex numbers."""
    half = x.shape[-1] // 2
    waves = np.exp(1j * position * ROTARY.theta ** (-np.arange(half) / half))
    pairs = (x[..., :half] + 1j * x[..., half:]) * waves
    return np.concatenate([pairs.real, pairs.imag], -1)


def by_the_paper(mixer, x):
    """The paper's loop in NumPy: a cache of keys before rotation, rotated by slot in each step."""

    def project(name):
        return np.einsum("td,dnh->tnh", x, np.asarray(getattr(mixer, name).kernel[...]))

    query, key, value = map(project, ("query", "key", "value"))
    cache, out = [], []
    for t in range(len(x)):
        cache.append(t)
        if len(cache) > SINKS + WINDOW:
            del cache[SINKS]
        keys = np.stack([turned(key[j, 0], slot) for slot, j in enumerate(cache)])
        logits = turned(query[t], len(cache) - 1) @ keys.T / query.shape[-1] ** 0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out.append((weights / weights.sum(-1, keepdims=True)) @ value[cache][:, 0])
    return np.einsum("tnh,nhd->td", np.stack(out), np.asarray(mixer.out.kernel[...]))


def test_positions_in_the_cache_are_those_of_the_paper():
    """At once, and in pieces with a state of a fixed size."""
    mixer, x = filled(make), floats(1, LENGTH, 16)
    expected = by_the_paper(mixer, x[0])
    out = jax.jit(lambda mixer, x: mixer(x))(mixer, x)
    np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=2e-5)
    extend = jax.jit(lambda mixer, x, state: mixer.extend(x, state))
    state, start = mixer.init_state(1, 1000), 0
    assert sum(x.size for x in jax.tree.leaves(state)) == 2 * (SINKS + WINDOW - 1) * 8 + 1
    for size in (1, 7, 1, 1, 7):
        y, state = extend(mixer, x[:, start : start + size], state)
        np.testing.assert_allclose(y[0], expected[start : start + size], rtol=1e-4, atol=2e-5)
        start += size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary": None}, "positions_in_cache=True needs a rotary embedding"),
        ({"positions_in_cache": 1}, "positions_in_cache must be True or False, got 1"),
        ({"sink_query": 1}, "StreamingSelfAttention has no option sink_query"),
        ({"window_size": 0}, "window_size must be an int, 1 or more tokens"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
