"""Linear attention with decays, with all its pairs: what lies between two tokens decays."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.references.pairs import Pairs
from tests.references.reference import Reference


def decayed(arrays, pairs: Pairs, log_decay, scale=1.0, bonus=None):
    """`log_decay (*B, S, K, f)`: the sum over the pairs, one more for the initial state.

    With a bonus `(K, H)` a token reads what there was before it, and itself by so much.
    """
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    dtype = functools.reduce(jnp.promote_types, (query.dtype, value.dtype, jnp.float32))
    q, k, v = (
        query.astype(dtype) * jnp.asarray(scale, dtype),
        key.astype(dtype),
        value.astype(dtype),
    )
    groups = query.shape[-2] // key.shape[-2]
    log_decay = jnp.where(pairs.present[..., None, None], log_decay.astype(dtype), 0)
    so_far = jnp.cumsum(log_decay, -3)

    def decay(logarithm, where):
        return jnp.exp(jnp.where(where[..., None, None], logarithm, -jnp.inf))

    of_queries = functools.partial(jnp.repeat, repeats=groups, axis=-2)
    until, itself = so_far, jnp.zeros(())
    seen = pairs.allowed
    if bonus is not None:
        itself = jnp.eye(seen.shape[-1])[..., None, None] * bonus.astype(dtype)
        itself = jnp.where(seen[..., None, None], itself, 0)
        until, seen = so_far - log_decay, seen & ~jnp.eye(seen.shape[-1], dtype=bool)
    between = itself + decay(until[..., :, None, :, :] - so_far[..., None, :, :, :], seen)
    between = jnp.broadcast_to(between, (*between.shape[:-1], k.shape[-1]))
    weights = jnp.einsum("...tnf,...snf,...tsnf->...nts", q, of_queries(k), of_queries(between))
    out = jnp.einsum("...nts,...snd->...tnd", weights, of_queries(v))
    reached = k * decay(so_far[..., -1:, :, :] - so_far, pairs.reaches_final)
    state = jnp.einsum("...skf,...skd->...kfd", reached, v)
    if "initial_state" in arrays:
        initial = arrays["initial_state"].astype(dtype)
        kept = decay(so_far[..., -1, :, :], pairs.keeps_initial)
        state = state + kept[..., None] * initial
        reading = q * of_queries(decay(until, pairs.reads_initial))
        initial = jnp.repeat(initial, groups, -3)
        out = out + jnp.einsum("...tnf,...nfd->...tnd", reading, initial)
    return {"out": out.astype(value.dtype), "state": state}


def retention(arrays, pairs: Pairs, keep, **_):
    key = arrays["key"]
    own = jnp.log(1 - 2.0 ** (-5.0 - jnp.arange(key.shape[-2])))
    log_decay = arrays.get("log_decay", own)
    log_decay = jnp.broadcast_to(log_decay[:, None], (*key.shape[:-1], 1))
    return decayed(arrays, pairs, log_decay, arrays.get("scale", key.shape[-1] ** -0.5))


def gated_linear(arrays, pairs: Pairs, keep, **_):
    key, log_decay = arrays["key"], arrays["log_decay"]
    log_decay = log_decay if log_decay.ndim == key.ndim else log_decay[..., None]
    return decayed(arrays, pairs, log_decay, arrays.get("scale", key.shape[-1] ** -0.5))


def rwkv6(arrays, pairs: Pairs, keep, **_):
    return decayed(arrays, pairs, arrays["log_decay"], bonus=arrays["bonus"])


def mamba2(arrays, pairs: Pairs, keep, **_):
    value, step = arrays["value"], arrays["step_size"]
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    scaled = value.astype(dtype) * step[..., None].astype(dtype)
    log_decay = (step.astype(dtype) * arrays["rate"].astype(dtype))[..., None]
    results = decayed({**arrays, "value": scaled}, pairs, log_decay)
    return {**results, "out": results["out"].astype(value.dtype)}


def mamba(arrays, pairs: Pairs, keep, **_):
    """Entry by entry of the state, each a recurrence of one feature and one value."""
    value, rate = arrays["value"], arrays["rate"]
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    step = arrays["step_size"].astype(dtype)
    scaled, outs, states = value.astype(dtype) * step, [], []
    for d in range(value.shape[-1]):
        entry = {**arrays, "value": scaled[..., d : d + 1]}
        if "initial_state" in arrays:
            entry["initial_state"] = arrays["initial_state"][..., d : d + 1]
        results = decayed(entry, pairs, step[..., d : d + 1] * rate[:, d].astype(dtype))
        outs.append(results["out"])
        states.append(results["state"])
    out = jnp.concatenate(outs, -1).astype(value.dtype)
    return {"out": out, "state": jnp.concatenate(states, -1)}


def _tokens(sizes):
    return (*sizes.batch, sizes.keys, sizes.key_heads)


RETENTION = Reference(
    attend=retention,
    variants={"": {}},
    tuning={"chunk_size": 3},
    arguments=lambda rng, sizes: {"log_decay": -rng.uniform(0, 1, size=sizes.key_heads)},
    per_head=frozenset({"log_decay"}),
    decays=frozenset({"log_decay"}),
    normalized=False,
)
GATED_LINEAR = Reference(
    attend=gated_linear,
    variants={"": {}},
    tuning={"chunk_size": 3},
    arguments=lambda rng, sizes: {
        "log_decay": -rng.uniform(0, 1, size=(*_tokens(sizes), sizes.size))
    },
    per_token=frozenset({"log_decay"}),
    decays=frozenset({"log_decay"}),
    normalized=False,
)
RWKV6 = Reference(
    attend=rwkv6,
    variants={"": {}},
    tuning={"chunk_size": 3},
    arguments=lambda rng, sizes: {
        "log_decay": -rng.uniform(0, 1, size=(*_tokens(sizes), sizes.size)),
        "bonus": rng.normal(size=(sizes.key_heads, sizes.size)),
    },
    per_token=frozenset({"log_decay"}),
    per_head=frozenset({"bonus"}),
    decays=frozenset({"log_decay"}),
    normalized=False,
)
MAMBA2 = Reference(
    attend=mamba2,
    variants={"": {}},
    tuning={"chunk_size": 3},
    arguments=lambda rng, sizes: {
        "step_size": np.log1p(np.exp(rng.normal(size=_tokens(sizes)))),
        "rate": -rng.uniform(0.2, 1, size=sizes.key_heads),
    },
    per_token=frozenset({"step_size"}),
    per_head=frozenset({"rate"}),
    decays=frozenset({"rate"}),
    normalized=False,
)
MAMBA = Reference(
    attend=mamba,
    variants={"": {}},
    tuning={"chunk_size": 3},
    arguments=lambda rng, sizes: {
        "step_size": np.log1p(np.exp(rng.normal(size=(*_tokens(sizes), sizes.value_size)))),
        "rate": -rng.uniform(0.2, 1, size=(sizes.key_heads, sizes.value_size, sizes.size)),
    },
    per_token=frozenset({"step_size"}),
    per_head=frozenset({"rate"}),
    decays=frozenset({"rate"}),
    normalized=False,
)
