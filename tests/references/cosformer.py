"""cosFormer with all its pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.references.pairs import Pairs
from tests.references.reference import Reference


def cosformer(arrays, pairs: Pairs, keep, *, max_length, **_):
    """Positions are places in a document."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    groups = query.shape[-2] // key.shape[-2]
    dtype = functools.reduce(jnp.promote_types, (query.dtype, value.dtype, jnp.float32))
    heads_of_keys = functools.partial(jnp.repeat, repeats=groups, axis=-2)
    query, key = jax.nn.relu(query.astype(dtype)), jax.nn.relu(key.astype(dtype))
    values = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1).astype(dtype)
    t, s = jnp.arange(query.shape[-3]), jnp.arange(key.shape[-3])

    def features(x, position):
        angle = (np.pi / 2 / max_length * position).astype(dtype)[..., None, None]
        return jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], -1)

    # Not causal, the document of a key starts at the first query that sees it, and so on.
    first_query, first_key = jnp.argmax(pairs.allowed, -2), jnp.argmax(pairs.allowed, -1)
    of_query = t - jnp.where(pairs.is_causal, 0, jnp.take_along_axis(first_query, first_key, -1))
    of_key = s - jnp.where(pairs.is_causal, 0, jnp.take_along_axis(first_key, first_query, -1))
    weights = jnp.einsum(
        "...tnf,...snf->...nts", features(query, of_query), heads_of_keys(features(key, of_key))
    )
    weights = jnp.where(pairs.allowed[..., None, :, :], weights, 0)
    out = jnp.einsum("...nts,...snd->...tnd", weights, heads_of_keys(values))

    reached = pairs.reaches_final
    after = jnp.max(jnp.where(reached, s + 1, 0), -1)[..., None]
    phi = features(jnp.where(reached[..., None, None], key, 0), s - after)
    state = jnp.einsum("...skf,...skd->...kfd", phi, values)
    if "initial_state" in arrays:
        initial = arrays["initial_state"].astype(dtype)
        origin = jnp.zeros_like(after)
        if t.size == s.size:
            first = jnp.argmax(pairs.valid | pairs.present, -1)[..., None]
            origin = jnp.where(pairs.is_causal, first, 0)
        turn = np.pi / 2 / max_length * jnp.where(reached.any(-1, keepdims=True), after - origin, 0)
        cos, sin = (f(turn.astype(dtype))[..., None, None] for f in (jnp.cos, jnp.sin))
        one, two = jnp.split(initial, 2, -2)
        turned = jnp.concatenate([one * cos + two * sin, two * cos - one * sin], -2)
        state = state + jnp.where(pairs.keeps_initial[..., None, None, None], turned, 0)
        reading = jnp.where(pairs.reads_initial[..., None, None], features(query, t - origin), 0)
        out = out + jnp.einsum("...tnf,...nfd->...tnd", reading, jnp.repeat(initial, groups, -3))
    total = out[..., -1:]
    out = jnp.where(total == 0, 0, out[..., :-1] / jnp.where(total == 0, 1, total))
    return {"out": out.astype(value.dtype), "state": state}


def arguments(rng: np.random.Generator, sizes):
    """Queries and keys in place of normal ones, of which some have hardly a positive entry alike.

    There the sum of the weights is nearly zero, and the error of every form is a matter of luck.
    """
    of_query = (*sizes.batch, sizes.queries, sizes.heads, sizes.size)
    of_key = (*sizes.batch, sizes.keys, sizes.key_heads, sizes.size)
    return {
        "query": rng.uniform(-0.5, 1.5, size=of_query),
        "key": rng.uniform(-0.5, 1.5, size=of_key),
    }


COSFORMER = Reference(
    attend=cosformer,
    variants={"": {"max_length": 17}},
    tuning={"chunk_size": 3},
    state_and_segments=False,
    arguments=arguments,
)
