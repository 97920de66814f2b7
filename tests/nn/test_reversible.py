"""ReversibleStack: the results of the plain layers, in the memory of one layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.analysis import cost
from effattn.nn import (
    LSHSelfAttention,
    RetNet,
    ReversibleStack,
    SelfAttention,
    SwiGLU,
)
from effattn.nn.dropout import dropout
from tests import closeness
from tests.marks import slow
from tests.nn.build import filled, floats

FEATURES, LENGTH = 8, 11


class Normed(nnx.Module):
    """A feed-forward layer after a norm, with dropout."""

    def __init__(self, features, rate=0.0, *, rngs):
        self.norm = nnx.RMSNorm(features, rngs=rngs)
        self.layer = SwiGLU(features, 3 * features, rngs=rngs)
        self.rate = rate

    def __call__(self, x, *, rngs=None):
        return dropout(self.layer(self.norm(x)), self.rate, rngs)


def stack(depth, *, mixers=None, features=FEATURES, rate=0.0):
    rngs = nnx.Rngs(0)

    def softmax():
        return SelfAttention(features, 2, dropout_rate=rate, rngs=rngs)

    mixers = mixers or [softmax]
    return ReversibleStack(
        *((mixers[n % len(mixers)](), Normed(features, rate, rngs=rngs)) for n in range(depth))
    )


def plainly(stack, x1, x2, key=None, **padding):
    for place, (first, second) in enumerate(zip(stack.first, stack.second, strict=True)):
        keys = [None if key is None else jax.random.fold_in(key, 2 * place + n) for n in (0, 1)]
        x1 = x1 + first(x2, rngs=keys[0], **padding)
        x2 = x2 + second(x1, rngs=keys[1])
    return x1, x2


class Noise(nnx.Module):
    """Multiplication by random numbers, as a cheap module that draws from its key."""

    def __call__(self, x, *, rngs):
        return x * jax.random.normal(rngs, x.shape)


def draw(seed, length=LENGTH):
    return floats(2, length, FEATURES, seed=seed)


def with_gradients(call, stack, *streams):
    results, pull_back = jax.vjp(call, stack, *streams)
    return results, pull_back((draw(7), draw(8)))


close = functools.partial(closeness.close, tolerance=1e-4)


@pytest.mark.parametrize(("depth", "rate"), [(4, 0.0), slow(2, 0.4)])
def test_it_is_the_plain_stack(depth, rate):
    """Checks outputs and gradients, with the same dropout forward and backward."""
    layers = filled(lambda: stack(depth, rate=rate))

    @functools.partial(jax.jit, static_argnums=0)
    def run(call, key):
        keyed = functools.partial(call, **({} if rate == 0 else {"key": key}))
        return with_gradients(keyed, layers, draw(0), draw(1))

    def reversibly(stack, x1, x2, key=None):
        return stack(x1, x2, rngs=key)

    ours = run(reversibly, jax.random.key(3))
    close(ours, run(plainly, jax.random.key(3)))
    if rate:
        other = run(reversibly, jax.random.key(4))
        assert np.abs(other[0][0] - ours[0][0]).max() > 0.1


def test_each_layer_draws_with_a_key_of_its_own():
    """Each key is the same forward and backward."""
    layers = ReversibleStack((Noise(), Noise()))
    streams, key = (draw(0), draw(1)), jax.random.key(3)

    @jax.jit
    def run(*streams):
        ours = jax.vjp(lambda *xs: layers(*xs, rngs=key), *streams)
        expected = jax.vjp(lambda *xs: plainly(layers, *xs, key), *streams)
        return [(results, pull_back((draw(7), draw(8)))) for results, pull_back in (ours, expected)]

    close(*run(*streams))


@pytest.mark.slow
def test_any_mixer_will_do_with_padding():
    """Mixers with arrays that are not trained, and recurrences; NaN in padding has no effect."""
    lsh = {"num_rounds": 2, "num_buckets": 4, "chunk_length": 4}
    mixers = [
        lambda: LSHSelfAttention(FEATURES, 2, **lsh, rngs=nnx.Rngs(0)),
        lambda: RetNet(FEATURES, 2, rngs=nnx.Rngs(0)),
    ]
    layers = filled(lambda: stack(2, mixers=mixers))
    segment_ids = np.array([[1] * 4 + [2] * 5 + [0] * 2, [3] * 11])
    valid = (segment_ids != 0)[..., None]
    streams = [np.where(valid, draw(seed), np.nan) for seed in (0, 1)]

    def kept(call, clean):
        def of_valid(layers, x1, x2):
            if clean:
                x1, x2 = (jnp.where(valid, x, 0) for x in (x1, x2))
            return [jnp.where(valid, y, 0) for y in call(layers, x1, x2, segment_ids=segment_ids)]

        @jax.jit
        def gradients(*args):
            results, pull_back = jax.vjp(of_valid, *args)
            return results, pull_back([draw(7), draw(8)])

        return gradients(layers, *streams)

    ours = kept(lambda m, *args, **given: m(*args, **given), clean=False)
    close(ours, kept(plainly, clean=True))
    rotations = ours[1][0].first[0].rotations[...]
    assert not np.any(rotations)


def test_one_stream_starts_both():
    layers, x = filled(lambda: stack(2)), draw(0)
    one, both = jax.jit(lambda layers: (layers(x), layers(x, x)))(layers)
    jax.tree.map(np.testing.assert_array_equal, one, both)


def test_gradients_by_the_transformations_of_flax():
    layers, x = filled(lambda: stack(1)), draw(0)

    def loss(layers, call):
        y1, y2 = call(layers, x, x)
        return jnp.mean(y1 * y2)

    ours = nnx.jit(nnx.grad(lambda m: loss(m, lambda m, *xs: m(*xs))))(layers)
    close(ours, nnx.jit(nnx.grad(lambda m: loss(m, plainly)))(layers))


def test_streams_are_wide_where_tokens_are_narrow():
    """Rounded to bfloat16, a sum of two numbers does not determine the numbers."""
    layers = filled(lambda: stack(1))
    x1, x2 = draw(0).astype(jnp.bfloat16), draw(1)
    y1, y2 = jax.jit(lambda m, *xs: m(*xs))(layers, x1, x2)
    assert y1.dtype == jnp.bfloat16 and y2.dtype == jnp.float32


def temporary_bytes(call, depth):
    layers = jax.eval_shape(lambda: stack(depth, features=32))
    x = jax.ShapeDtypeStruct((1, 512, 32), jnp.float32)

    def run(layers, x):
        y, pull_back = jax.vjp(call, layers, x, x)
        return y, pull_back(y)

    return cost.temporary_bytes(jax.jit(run).trace(layers, x))


@pytest.mark.slow
def test_activations_take_the_memory_of_one_layer():
    """Temporary memory of forward and backward; in the plain stack it grows with the depth."""
    ours = [temporary_bytes(lambda m, *xs: m(*xs), depth) for depth in (4, 8, 16)]
    assert max(ours) <= 1.1 * min(ours), ours
    plain = [temporary_bytes(plainly, depth) for depth in (4, 8)]
    assert plain[1] > 1.6 * plain[0] and plain[0] > ours[0], (plain, ours)


def test_derivatives_along_a_tangent_are_those_of_the_gradients():
    rngs = nnx.Rngs(0)
    layers = ReversibleStack((SwiGLU(8, 8, rngs=rngs), SwiGLU(8, 8, rngs=rngs)))
    x, tangent = draw(0), draw(1)
    y, along = jax.jvp(lambda x: layers(x)[0], (x,), (tangent,))
    (gradient,) = jax.vjp(lambda x: layers(x)[0], x)[1](y)
    np.testing.assert_allclose((along * y).sum(), (gradient * tangent).sum(), rtol=1e-5)


def test_what_it_cannot_take_is_named():
    rngs = nnx.Rngs(0)
    layers = ReversibleStack((SwiGLU(8, 8, rngs=rngs), SwiGLU(8, 8, rngs=rngs)))
    with pytest.raises(ValueError, match="lengths was given, but no module of the stack takes it"):
        layers(draw(0), lengths=jnp.array([3, 4]))
    with pytest.raises(
        ValueError, match=r"must have one shape .* got \(2, 11, 8\) and \(2, 3, 8\)"
    ):
        layers(draw(0), draw(0, 3))
    with pytest.raises(ValueError, match=r"x must have shape \(..., 8\), got \(2, 11, 7\)"):
        layers(draw(0)[..., :7])
    for wrong in ((), (SwiGLU(8, 8, rngs=rngs),), ((SwiGLU(8, 8, rngs=rngs), 3),), ("ab",)):
        with pytest.raises(ValueError, match=r"one or more pairs \(F, G\) of modules"):
            ReversibleStack(*wrong)


@pytest.mark.parametrize("rows", [1, 3])
def test_padding_of_another_batch_is_refused(rows):
    layers, x = stack(1), draw(0)
    with pytest.raises(ValueError, match=r"lengths must be integers of shape \(2,\), one for .*"):
        layers(x, lengths=np.full(rows, 2))
    with pytest.raises(
        ValueError, match=r"segment_ids must be integers of shape \(2, 11\), got .*"
    ):
        layers(x, segment_ids=np.ones((rows, LENGTH), int))
