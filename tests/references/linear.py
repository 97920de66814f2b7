"""Linear attention with all its pairs."""

import functools

import jax.numpy as jnp

from tests.references.pairs import Pairs
from tests.references.reference import Reference

PHI = {
    "elu": lambda x: jnp.exp(jnp.minimum(x, 0)) + jnp.maximum(x, 0),
    "relu": lambda x: jnp.maximum(x, 0),
    "identity": lambda x: x,
}


def linear(arrays, pairs: Pairs, keep, *, feature_map, normalize=None, **_):
    """The sum over the pairs and, of what the initial state stands for, one more term."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    groups = query.shape[-2] // value.shape[-2]
    dtype = functools.reduce(jnp.promote_types, (query.dtype, value.dtype, jnp.float32))
    query, key = (PHI[feature_map](x.astype(dtype)) for x in (query, key))
    values = value.astype(dtype)
    normalized = feature_map != "identity" if normalize is None else normalize
    if normalized:
        values = jnp.concatenate([values, jnp.ones_like(values[..., :1])], -1)
    # The scale cancels where the sum of the weights divides; it multiplies what is read.
    scale = 1.0 if normalized else arrays.get("scale", query.shape[-1] ** -0.5)
    query = query * jnp.asarray(scale, dtype)

    reached = jnp.where(pairs.reaches_final[..., None, None], key, 0)
    state = jnp.einsum("...skf,...skd->...kfd", reached, values)
    heads_of_keys = functools.partial(jnp.repeat, repeats=groups, axis=-2)
    weights = jnp.einsum("...tnf,...snf->...nts", query, heads_of_keys(key))
    weights = jnp.where(pairs.allowed[..., None, :, :], weights, 0)
    out = jnp.einsum("...nts,...snd->...tnd", weights, heads_of_keys(values))
    if "initial_state" in arrays:
        initial = arrays["initial_state"].astype(dtype)
        state = state + jnp.where(pairs.keeps_initial[..., None, None, None], initial, 0)
        reading = jnp.where(pairs.reads_initial[..., None, None], query, 0)
        initial = jnp.repeat(initial, groups, axis=-3)
        out = out + jnp.einsum("...tnf,...nfd->...tnd", reading, initial)
    if normalized:
        total = out[..., -1:]
        out = jnp.where(total == 0, 0, out[..., :-1] / jnp.where(total == 0, 1, total))
    return {"out": out.astype(value.dtype), "state": state}


LINEAR = Reference(
    attend=linear,
    variants={
        "": {"feature_map": "elu"},
        "relu": {"feature_map": "relu"},
        "identity": {"feature_map": "identity"},
    },
    tuning={"chunk_size": 3},
    state_and_segments=False,
)
