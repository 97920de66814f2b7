"""Hedgehog with all its pairs: linear attention of its features."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.references.linear import linear
from tests.references.pairs import Pairs
from tests.references.reference import Reference


def hedgehog(arrays, pairs: Pairs, keep, **_):
    given = (arrays[name] for name in ("query", "key", "value"))
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in given), jnp.float32)

    def features(name):
        x, w = arrays[name].astype(dtype), arrays[f"{name}_projection"].astype(dtype)
        w = jnp.repeat(w, x.shape[-2] // len(w), 0)
        x = jnp.exp(jnp.einsum("...tnh,nfh->...tnf", x, w))
        return jnp.concatenate([y / y.sum(-1, keepdims=True) for y in (x, 1 / x)], -1)

    arrays = {**arrays, "query": features("query"), "key": features("key")}
    return linear(arrays, pairs, keep, feature_map="identity", normalize=True)


def arguments(rng: np.random.Generator, sizes):
    shape = (sizes.key_heads, 4, sizes.size)
    return {name: rng.normal(size=shape) for name in ("query_projection", "key_projection")}


HEDGEHOG = Reference(
    attend=hedgehog,
    variants={"": {}},
    tuning={"chunk_size": 3},
    state_and_segments=False,
    arguments=arguments,
    per_head=frozenset({"query_projection", "key_projection"}),
)
