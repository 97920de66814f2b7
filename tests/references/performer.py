"""Performer with all its pairs and all its features."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from effattn.functional.performer import PerformerState
from tests.references.pairs import Pairs
from tests.references.reference import Reference


def performer(arrays, pairs: Pairs, keep, **_):
    """Queries' features are divided by their largest, those of keys by the largest of all.

    In the state they are divided by the largest that is in it.
    """
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    groups = query.shape[-2] // key.shape[-2]
    dtype = functools.reduce(jnp.promote_types, (query.dtype, value.dtype, jnp.float32))
    root = jnp.asarray(arrays.get("scale", query.shape[-1] ** -0.5), dtype) ** 0.5
    heads_of_keys = functools.partial(jnp.repeat, repeats=groups, axis=-2)
    w = arrays["projection"].astype(dtype)
    w = jnp.broadcast_to(w, (key.shape[-2], *w.shape[1:]))
    query, key = query.astype(dtype) * root, key.astype(dtype) * root
    of_query = jnp.einsum("...tnh,nmh->...tnm", query, jnp.repeat(w, groups, 0))
    of_key = jnp.einsum("...skh,kmh->...skm", key, w)
    values = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1).astype(dtype)
    reached = pairs.reaches_final[..., None]
    initial = arrays.get("initial_state")
    of_query = of_query - (query**2).sum(-1, keepdims=True) / 2
    of_key = of_key - (key**2).sum(-1, keepdims=True) / 2
    of_query = jnp.exp(of_query - jax.lax.stop_gradient(of_query.max(-1, keepdims=True)))
    largest = jax.lax.stop_gradient(of_key.max(-1))
    last = jnp.where(reached, largest, -jnp.inf).max(-2)
    first = jnp.full_like(last, -jnp.inf)
    if initial is not None:
        empty = (initial.sums == 0).all((-2, -1))
        first = jnp.where(empty, -jnp.inf, initial.maximum.astype(dtype))
    kept = jnp.where(pairs.keeps_initial[..., None], first, -jnp.inf)
    maximum = jnp.where(kept >= last, kept, last)
    maximum = jnp.where(jnp.isfinite(maximum), maximum, 0)
    unit = jax.lax.stop_gradient(jnp.where(pairs.present[..., None], largest, -jnp.inf))
    unit = jnp.maximum(unit.max(-2), jax.lax.stop_gradient(first))
    unit = jnp.where(jnp.isfinite(unit), unit, 0)
    at = jax.lax.stop_gradient(maximum)
    first = jax.lax.stop_gradient(first)
    into, onto = jnp.exp(first - unit), jnp.exp(first - at)
    in_state = jnp.exp(jnp.where(reached[..., None], of_key - at[..., None, :, None], 0))
    of_key = jnp.exp(of_key - unit[..., None, :, None])

    state = jnp.einsum("...skm,...skd->...kmd", jnp.where(reached[..., None], in_state, 0), values)
    weights = jnp.einsum("...tnm,...snm->...nts", of_query, heads_of_keys(of_key))
    weights = jnp.where(pairs.allowed[..., None, :, :], weights, 0)
    out = jnp.einsum("...nts,...snd->...tnd", weights, heads_of_keys(values))
    if initial is not None:
        sums = initial.sums.astype(dtype)
        kept = jnp.asarray(onto)[..., None, None] * sums
        state = state + jnp.where(pairs.keeps_initial[..., None, None, None], kept, 0)
        reading = jnp.where(pairs.reads_initial[..., None, None], of_query, 0)
        sums = jnp.repeat(jnp.asarray(into)[..., None, None] * sums, groups, axis=-3)
        out = out + jnp.einsum("...tnm,...nmd->...tnd", reading, sums)
    total = out[..., -1:]
    out = jnp.where(total == 0, 0, out[..., :-1] / jnp.where(total == 0, 1, total))
    return {"out": out.astype(value.dtype), "state": PerformerState(state, maximum)}


def arguments(rng: np.random.Generator, sizes):
    return {"projection": rng.normal(size=(sizes.key_heads, 7, sizes.size))}


PERFORMER = Reference(
    attend=performer,
    variants={"": {"kernel": "softmax"}},
    tuning={"chunk_size": 3},
    state_and_segments=False,
    arguments=arguments,
    per_head=frozenset({"projection"}),
)
