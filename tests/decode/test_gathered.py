"""Of a sparse pattern a step reads what the pattern reaches, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import registry

MECHANISMS = {
    f"{kind} {factor}": ("sparse_transformer", {"kind": kind, "factor": factor, **options})
    for kind, options in (("strided", {"stride": 4}), ("fixed", {"stride": 4, "summary": 2}))
    for factor in ("merged", "first", "second")
}
# Strides that are longer than the sequence, and that are one token.
MECHANISMS["strided far"] = ("sparse_transformer", {"stride": 20})
MECHANISMS["fixed near"] = ("sparse_transformer", {"stride": 1, "kind": "fixed"})
LENGTH = 11


def heads(time, batch=2, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, time, 4, 8), (batch, time, 2, 8), (batch, time, 2, 6)]
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def decoder_of(name, options):
    return registry.load(registry.get(name).decoder)(registry.get(name).function, options)


def parallel_of(name, options):
    return jax.jit(functools.partial(registry.get(name).function, **options))


@pytest.fixture(params=MECHANISMS)
def mechanism(request):
    name, options = MECHANISMS[request.param]
    return parallel_of(name, options), decoder_of(name, options)


def extend_all(decoder, arrays, split, capacity=LENGTH):
    state = decoder.init(len(arrays[0]), capacity, 2, 8, 6, jnp.float32)
    extend = jax.jit(decoder.extend)
    outs, start = [], 0
    for time in split:
        out, state = extend(*(x[:, start : start + time] for x in arrays), state)
        outs.append(out)
        start += time
    return jnp.concatenate(outs, 1), state


def test_a_prefill_and_steps_equal_the_whole(mechanism):
    parallel, decoder = mechanism
    arrays = heads(LENGTH)
    out, state = extend_all(decoder, arrays, (7, *(1,) * 4), capacity=LENGTH + 2)
    np.testing.assert_allclose(out, parallel(*arrays), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.length, [LENGTH, LENGTH])
