"""Based's linear attention with all its pairs: a polynomial of the logits."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.references.pairs import Pairs
from tests.references.reference import Reference


def features(x, xp=jnp):
    """Their products are 1 + z + z^2 / 2 of z = x . y: 1, x, and each product of two entries."""
    first, second = np.triu_indices(x.shape[-1], 1)
    squares = x**2 * 0.5**0.5, x[..., first] * x[..., second]
    return xp.concatenate([xp.ones_like(x[..., :1]), x, *squares], -1)


def based(arrays, pairs: Pairs, keep, **_):
    """1 + z + z^2 / 2; features are for the state alone."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    groups = query.shape[-2] // key.shape[-2]
    dtype = functools.reduce(jnp.promote_types, (query.dtype, value.dtype, jnp.float32))
    heads_of_keys = functools.partial(jnp.repeat, repeats=groups, axis=-2)
    root = jnp.asarray(arrays.get("scale", query.shape[-1] ** -0.5), dtype) ** 0.5
    query, key = query.astype(dtype) * root, key.astype(dtype) * root
    values = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1).astype(dtype)
    logits = jnp.einsum("...tnh,...snh->...nts", query, heads_of_keys(key))
    weights = jnp.where(pairs.allowed[..., None, :, :], 1 + logits + logits**2 / 2, 0)
    out = jnp.einsum("...nts,...snd->...tnd", weights, heads_of_keys(values))
    reached = jnp.where(pairs.reaches_final[..., None, None], features(key), 0)
    state = jnp.einsum("...skf,...skd->...kfd", reached, values)
    if "initial_state" in arrays:
        initial = arrays["initial_state"].astype(dtype)
        state = state + jnp.where(pairs.keeps_initial[..., None, None, None], initial, 0)
        reading = jnp.where(pairs.reads_initial[..., None, None], features(query), 0)
        out = out + jnp.einsum("...tnf,...nfd->...tnd", reading, jnp.repeat(initial, groups, -3))
    total = out[..., -1:]
    out = jnp.where(total == 0, 0, out[..., :-1] / jnp.where(total == 0, 1, total))
    return {"out": out.astype(value.dtype), "state": state}


def after_tokens(rng, shape):
    """The state that some tokens leave: of others, queries may have no weight to divide by."""
    *batch, width, size = shape.shape
    head_size = next(h for h in range(width) if 1 + h + h * (h + 1) // 2 == width)
    x, values = (rng.normal(size=(*batch, 4, n)) for n in (head_size, size))
    values[..., -1] = 1
    return np.einsum("...sf,...sd->...fd", features(x, np), values)


BASED = Reference(
    attend=based,
    variants={"": {}},
    tuning={"chunk_size": 3},
    state_and_segments=False,
    initial_state=after_tokens,
)
