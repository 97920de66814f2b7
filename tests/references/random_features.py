"""Random feature attention with all its pairs: cosines of differences."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.references.pairs import Pairs
from tests.references.reference import Reference


def random_features(arrays, pairs: Pairs, keep, **_):
    """As sin a sin b + cos a cos b = cos(a - b); features are for the state alone."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    groups = query.shape[-2] // key.shape[-2]
    dtype = functools.reduce(jnp.promote_types, (query.dtype, value.dtype, jnp.float32))
    heads_of_keys = functools.partial(jnp.repeat, repeats=groups, axis=-2)
    query, key = (
        x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        for x in (query.astype(dtype), key.astype(dtype))
    )
    w = arrays["projection"].astype(dtype)
    of_query = jnp.einsum("...tnh,nmh->...tnm", query, jnp.repeat(w, groups, 0))
    of_key = jnp.einsum("...skh,kmh->...skm", key, w)
    values = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1).astype(dtype)

    def features(angles):
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) * w.shape[1] ** -0.5

    between = of_query[..., :, None, :, :] - heads_of_keys(of_key)[..., None, :, :, :]
    weights = jnp.where(pairs.allowed[..., None], jnp.cos(between).mean(-1), 0)
    out = jnp.einsum("...tsn,...snd->...tnd", weights, heads_of_keys(values))
    reached = jnp.where(pairs.reaches_final[..., None, None], features(of_key), 0)
    state = jnp.einsum("...skf,...skd->...kfd", reached, values)
    if "initial_state" in arrays:
        initial = arrays["initial_state"].astype(dtype)
        state = state + jnp.where(pairs.keeps_initial[..., None, None, None], initial, 0)
        reading = jnp.where(pairs.reads_initial[..., None, None], features(of_query), 0)
        out = out + jnp.einsum("...tnf,...nfd->...tnd", reading, jnp.repeat(initial, groups, -3))
    total = out[..., -1:]
    out = jnp.where(total == 0, 0, out[..., :-1] / jnp.where(total == 0, 1, total))
    return {"out": out.astype(value.dtype), "state": state}


def arguments(rng: np.random.Generator, sizes):
    """Vectors that are short enough for sums of cosines to stay away from zero."""
    return {"projection": rng.normal(size=(sizes.key_heads, 7, sizes.size)) / 3}


RANDOM_FEATURES = Reference(
    attend=random_features,
    variants={"": {}},
    tuning={"chunk_size": 3},
    state_and_segments=False,
    arguments=arguments,
    per_head=frozenset({"projection"}),
)
