"""The delta rule, one token at a time, with all that a query may see read anew for each query."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.references.reference import Reference


def delta_rule(arrays, pairs, keep, **_):
    """What is found under the key in the decayed state is replaced, by beta."""
    wide = functools.reduce(jnp.promote_types, (x.dtype for x in arrays.values()), jnp.float32)
    arrays = {name: x.astype(wide) for name, x in arrays.items()} | {"like": arrays["value"]}
    key, beta = arrays["key"], arrays["beta"][..., None]
    decay = jnp.exp(arrays.get("log_decay", jnp.zeros_like(beta[..., 0])))[..., None]
    scale = jnp.asarray(arrays.get("scale", key.shape[-1] ** -0.5), wide)
    written = {**arrays, "query": arrays["query"] * scale, "key": beta * key}
    return removing(written, pairs, decay, removed=beta * key, recalled=decay * key)


def rwkv7(arrays, pairs, keep, **_):
    wide = functools.reduce(jnp.promote_types, (x.dtype for x in arrays.values()), jnp.float32)
    arrays = {name: x.astype(wide) for name, x in arrays.items()} | {"like": arrays["value"]}
    recalled = arrays["removal_key"]
    removed = arrays["learning_rate"] * recalled
    return removing(arrays, pairs, jnp.exp(arrays["log_decay"]), removed, recalled)


def removing(arrays, pairs, decay, removed, recalled):
    """Every query has a state of its own, and so has the end: what it may not see does nothing."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    *batch, length, heads, _ = key.shape
    sees = jnp.concatenate([pairs.allowed, pairs.reaches_final[..., None, :]], -2)

    state = jnp.zeros((*batch, length + 1, heads, key.shape[-1], value.shape[-1]), key.dtype)
    if "initial_state" in arrays:
        starts = [pairs.reads_initial, pairs.keeps_initial[..., None]]
        starts = jnp.concatenate(starts, -1)[..., None, None, None]
        initial = arrays["initial_state"][..., None, :, :, :]
        state = jnp.where(starts, initial, state)

    def token(state, given):
        key, value, decay, removed, recalled, sees = given
        found = jnp.einsum("...kf,...tkfd->...tkd", recalled, state)
        after = decay[..., None, :, :, None] * state
        after = after - jnp.einsum("...kf,...tkd->...tkfd", removed, found)
        after = after + jnp.einsum("...kf,...kd->...kfd", key, value)[..., None, :, :, :]
        return jnp.where(sees[..., None, None, None], after, state), None

    axis = len(batch)
    tokens = [jnp.moveaxis(x, axis, 0) for x in (key, value, decay, removed, recalled)]
    state, _ = jax.lax.scan(token, state, (*tokens, jnp.moveaxis(sees, axis + 1, 0)))
    of_queries = jnp.repeat(state[..., :length, :, :, :], query.shape[-2] // heads, -3)
    out = jnp.einsum("...tnf,...tnfd->...tnd", query, of_queries)
    return {"out": out.astype(arrays["like"].dtype), "state": state[..., length, :, :, :]}


def strengths(rng, sizes):
    """For keys that are not of length 1, but about the square root of their size."""
    shape = (*sizes.batch, sizes.keys, sizes.key_heads)
    return {"beta": rng.uniform(0, 1, size=shape) / sizes.size}


def strengths_and_decays(rng, sizes):
    beta = strengths(rng, sizes)["beta"]
    return {"beta": beta, "log_decay": -rng.uniform(0, 1, size=beta.shape)}


def bounded(arrays):
    """Strengths with which the state stays bounded, whatever the keys: beta |k|^2 <= 1."""
    squares = (arrays["key"] ** 2).sum(-1)
    beta = arrays["beta"] / jnp.maximum(1, squares)
    return {**arrays, "beta": beta.astype(arrays["beta"].dtype)}


DELTA_NET = Reference(
    attend=delta_rule,
    variants={"": {}},
    tuning={"chunk_size": 3},
    arguments=strengths,
    per_token=frozenset({"beta"}),
    normalized=False,
    bounded=bounded,
)

GATED_DELTA_NET = Reference(
    attend=delta_rule,
    variants={"": {}},
    tuning={"chunk_size": 3},
    arguments=strengths_and_decays,
    per_token=frozenset({"beta", "log_decay"}),
    decays=frozenset({"log_decay"}),
    normalized=False,
    bounded=bounded,
)


def removals(rng, sizes):
    shape = (*sizes.batch, sizes.keys, sizes.key_heads, sizes.size)
    removal_key = rng.normal(size=shape)
    return {
        "log_decay": -rng.uniform(0, 1, size=shape),
        "removal_key": removal_key / np.linalg.norm(removal_key, axis=-1, keepdims=True),
        "learning_rate": rng.uniform(0, 1, size=shape),
    }


RWKV7 = Reference(
    attend=rwkv7,
    variants={"": {}},
    tuning={"chunk_size": 3},
    arguments=removals,
    per_token=frozenset({"log_decay", "removal_key", "learning_rate"}),
    decays=frozenset({"log_decay"}),
    normalized=False,
)
