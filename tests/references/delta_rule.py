"""The delta rule, one token at a time, with all that a query may see read anew for each query."""

import functools

import jax
import jax.numpy as jnp

from tests.references.reference import Reference


def delta_rule(arrays, pairs, keep, **_):
    """Every query has a state of its own, and so has the end: what it may not see does nothing."""
    names = [name for name in ("query", "key", "value", "beta", "log_decay") if name in arrays]
    wide = functools.reduce(jnp.promote_types, (arrays[n].dtype for n in names), jnp.float32)
    query, key, value, beta = (arrays[n].astype(wide) for n in names[:4])
    log_decay = arrays.get("log_decay", jnp.zeros_like(beta)).astype(wide)
    *batch, length, heads, _ = key.shape
    sees = jnp.concatenate([pairs.allowed, pairs.reaches_final[..., None, :]], -2)

    state = jnp.zeros((*batch, length + 1, heads, key.shape[-1], value.shape[-1]), wide)
    if "initial_state" in arrays:
        starts = [pairs.reads_initial, pairs.keeps_initial[..., None]]
        starts = jnp.concatenate(starts, -1)[..., None, None, None]
        initial = arrays["initial_state"].astype(wide)[..., None, :, :, :]
        state = jnp.where(starts, initial, state)

    def token(state, given):
        key, value, beta, log_decay, sees = given
        decayed = jnp.exp(log_decay)[..., None, :, None, None] * state
        found = jnp.einsum("...kf,...tkfd->...tkd", key, decayed)
        change = beta[..., None, :, None] * (value[..., None, :, :] - found)
        after = decayed + jnp.einsum("...kf,...tkd->...tkfd", key, change)
        return jnp.where(sees[..., None, None, None], after, state), None

    axis = len(batch)
    tokens = [jnp.moveaxis(x, axis, 0) for x in (key, value, beta, log_decay)]
    state, _ = jax.lax.scan(token, state, (*tokens, jnp.moveaxis(sees, axis + 1, 0)))
    scale = jnp.asarray(arrays.get("scale", query.shape[-1] ** -0.5), wide)
    of_queries = jnp.repeat(state[..., :length, :, :, :], query.shape[-2] // heads, -3)
    out = jnp.einsum("...tnf,...tnfd->...tnd", query * scale, of_queries)
    return {"out": out.astype(arrays["value"].dtype), "state": state[..., length, :, :, :]}


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
