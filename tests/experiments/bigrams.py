"""Small models that learn to count, for the tests of training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.harness.optimisers import make_optimiser
from experiments.harness.programs import Programs
from experiments.harness.schedules import Schedule
from tests.experiments.counting import Counting

TASK = Counting()
TWO_LENGTHS = Counting(lengths=(12, 8))
SCHEDULE = Schedule(steps=7, batch=4, accumulate=1, evaluate_every=3)
LENGTH = 12  # of validation examples


class Bigram(nnx.Module):
    """Bigram model: logits of the next token from the present token."""

    def __init__(self, rngs, dtype=jnp.float32):
        self.embed = nnx.Embed(16, 8, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(8, 16, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))

    def init_state(self, batch, max_length):
        return jnp.zeros((batch, max_length), jnp.float32)


class Projected(Bigram):
    """Bigram model whose features are projected by random features."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.features = nnx.Variable(rngs.normal((8, 8)))

    def redraw(self, rngs):
        self.features[...] = rngs.normal((8, 8))

    def __call__(self, tokens):
        return self.head(self.embed(tokens) @ self.features[...])


@functools.cache
def optimiser():
    return make_optimiser("adamw", steps=7, warmup=0.2, clip=1.0, weight_decay=0.01)


@functools.cache
def programs_of(build=Bigram, task=TASK, schedule=SCHEDULE, precision="float32", redraw=0):
    return Programs(build, optimiser(), schedule, task, precision, redraw)


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


VARIANTS = {
    "one length": {},
    "two lengths": {"task": TWO_LENGTHS},
    "random features": {"build": Projected, "redraw": 2},
    "float16": {"build": functools.partial(Bigram, dtype=jnp.float16), "precision": "float16"},
}
