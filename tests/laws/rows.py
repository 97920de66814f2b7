"""The law of the rows of a decode state: they can be repeated, reordered and dropped."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_rows_first(init_state: Any) -> None:
    """Every array of a state has the rows as its first axis, by the shapes alone."""
    for rows in (3, 5):
        state = jax.eval_shape(functools.partial(init_state, rows))
        assert {leaf.shape[:1] for leaf in jax.tree.leaves(state)} == {(rows,)}


def assert_rows_can_be_chosen(mixer: Any, x: np.ndarray) -> None:
    """Rows of x, of unequal lengths, decode as they do from the start, wherever they are moved."""
    count, prompt = len(x), x.shape[1] - 1
    assert_rows_first(lambda rows: mixer.init_state(rows, prompt + 1, jnp.float32))
    lengths = np.arange(count) % prompt + 1

    @jax.jit
    def continued(mixer, x, lengths, rows):
        state = mixer.init_state(count, prompt + 1, jnp.float32)
        _, state = mixer.extend(x[:, :prompt], state, lengths=lengths)
        return mixer.step(x[rows, prompt:], jax.tree.map(lambda a: a[rows], state))

    # Each in the place of another, two of them twice, and two dropped.
    rows = np.array([3, 0, 0, *range(4, count), 1, 1])[:count]
    moved = continued(mixer, x, lengths, rows)
    alone = continued(mixer, x[rows], lengths[rows], np.arange(count))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), moved, alone)
