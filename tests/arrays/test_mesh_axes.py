"""Calls that combine several options, on meshes with explicit axes.

The laws test one option at a time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import effattn
from effattn.patterns import Causal
from effattn.testing.functions import assert_close
from tests.laws.sharding import mesh, shard
from tests.marks import slow_but_for

pytestmark = pytest.mark.devices

IDS = np.repeat([[1, 2, 0]], [5, 7, 4], axis=1).repeat(4, 0)

CALLS = {
    "a score_mod": functools.partial(
        effattn.dot_product_attention,
        score_mod=lambda logit, b, h, i, j: jnp.where(i > j, logit, jnp.arange(2.0)[h] * logit),
    ),
    "a pattern and a score_mod": functools.partial(
        effattn.sparse_attention,
        pattern=Causal(),
        score_mod=lambda logit, b, h, i, j: logit - 0.1 * (i - j),
    ),
    "documents read both ways": functools.partial(effattn.linear_attention, segment_ids=IDS),
    "global tokens that lie elsewhere": functools.partial(
        effattn.longformer_attention,
        local_window_size=2,
        global_mask=IDS % 3 == 2,
        max_global=7,
    ),
    "a dilated window with offsets that lie elsewhere": functools.partial(
        effattn.sliding_window_attention,
        local_window_size=2,
        dilation=3,
        query_offset=np.arange(4),
    ),
}


def on_mesh(function):
    """Gradient of a sum of squares with sharded examples, its function, and the unsharded array."""
    query = np.random.default_rng(0).normal(size=(4, 16, 2, 3)).astype(np.float32)
    explicit = mesh(AxisType.Explicit)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(function(x, x, x) ** 2)))
    with jax.set_mesh(explicit):
        placed = shard(explicit, {"query": query}, query=PartitionSpec("batch"))["query"]
        return gradient(placed), gradient, query


@pytest.mark.parametrize("name", slow_but_for(["a score_mod", "documents read both ways"], CALLS))
def test_explicit_axes_change_nothing(name):
    placed, gradient, query = on_mesh(CALLS[name])
    assert_close(placed, gradient(query), 1e-6)


def test_a_score_mod_that_closes_over_an_array_of_the_mesh_is_told_what_to_do():
    def attend(query, key, value):
        slope = jnp.sum(query)
        score_mod = lambda logit, b, h, i, j: logit * slope  # noqa: E731
        return effattn.dot_product_attention(query, key, value, score_mod=score_mod)

    with pytest.raises(
        ValueError, match="score_mod may close over .* with jax.sharding.AxisType.Auto"
    ):
        on_mesh(attend)
