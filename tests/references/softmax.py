"""Softmax attention over any pairs, with all that the block core takes."""

import functools

import jax
import jax.numpy as jnp

from tests.references.pairs import Pairs
from tests.references.reference import Reference


def softmax(arrays, pairs: Pairs, keep, *, dropout_rate=0.0, **options):
    """The definition, in as many steps as it has."""
    logits = masked(scaled(arrays), arrays, pairs, **options)
    return weighted(logits, arrays, pairs, keep, dropout_rate)


def additive(arrays, pairs: Pairs, keep, *, dropout_rate=0.0, **_):
    """With all hidden numbers of all pairs."""
    dtype = _sum_dtype(arrays)
    names = "query", "key", "query_kernel", "key_kernel", "score"
    query, key, of_query, of_key, score = (arrays[name].astype(dtype) for name in names)
    key = jnp.repeat(key, query.shape[-2] // key.shape[-2], -2)
    query = jnp.einsum("...tnh,nha->...nta", query, of_query)
    key = jnp.einsum("...snh,nha->...nsa", key, of_key)
    hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
    logits = jnp.einsum("...ntsa,na->...nts", hidden, score)
    return weighted(masked(logits, arrays, pairs), arrays, pairs, keep, dropout_rate)


def sigmoid(arrays, pairs: Pairs, keep, *, logit_bias, dropout_rate=0.0, **options):
    logits = masked(scaled(arrays), arrays, pairs, **options) + logit_bias
    return {"out": mixed(1 / (1 + jnp.exp(-logits)), arrays, keep, dropout_rate)}


def squared_relu(arrays, pairs: Pairs, keep, *, divisor, dropout_rate=0.0, **options):
    logits = masked(scaled(arrays), arrays, pairs, **options)
    weights = jnp.maximum(logits, 0) ** 2 / divisor
    return {"out": mixed(weights, arrays, keep, dropout_rate)}


def _sum_dtype(arrays):
    dtypes = (arrays["query"].dtype, arrays["value"].dtype, jnp.float32)
    return functools.reduce(jnp.promote_types, dtypes)


def scaled(arrays):
    """Products `(*B, N, T, S)`."""
    query, key = arrays["query"], arrays["key"]
    key = jnp.repeat(key, query.shape[-2] // key.shape[-2], -2)
    dot = functools.partial(jnp.einsum, preferred_element_type=_sum_dtype(arrays))
    return arrays.get("scale", query.shape[-1] ** -0.5) * dot("...tnh,...snh->...nts", query, key)


def masked(logits, arrays, pairs: Pairs, *, score_mod=None, logits_soft_cap=None, **_):
    """With all that is done to logits; -inf where a pair may not attend."""
    if "bias" in arrays:
        logits = logits + arrays["bias"]
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if score_mod is not None:
        *batch, heads, _, keys = logits.shape
        b = jnp.arange(logits[..., 0, 0, 0].size).reshape(*batch, 1, 1, 1)
        h = jnp.arange(heads)[:, None, None]
        i = pairs.position[..., None, :, None]
        logits = score_mod(logits, b, h, i, jnp.arange(keys)).astype(_sum_dtype(arrays))
    return jnp.where(pairs.allowed[..., None, :, :], logits, -jnp.inf)


def weighted(logits, arrays, pairs: Pairs, keep, dropout_rate):
    """By a softmax."""
    if "sink" in arrays:
        sink = arrays["sink"].astype(logits.dtype)[:, None, None]
        sink = jnp.where(pairs.valid[..., None, :, None], sink, -jnp.inf)
        logits = jnp.concatenate([logits, sink], -1)

    # The largest logit of an empty row is -inf, and any number in its place keeps the row empty.
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(logits - largest)
    total = weights.sum(-1, keepdims=True)
    is_empty, total = total == 0, jnp.where(total == 0, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, jnp.log(total) + largest)
    out = mixed((weights / total)[..., : arrays["key"].shape[-3]], arrays, keep, dropout_rate)
    return {"out": out, "lse": jnp.moveaxis(lse[..., 0], -2, -1)}


def mixed(weights, arrays, keep, dropout_rate):
    """The values, by weights `(*B, N, T, S)`."""
    value = arrays["value"]
    value = jnp.repeat(value, weights.shape[-3] // value.shape[-2], -2)
    if keep is not None:
        weights = jnp.where(keep, weights / (1 - dropout_rate), 0)
    dot = functools.partial(jnp.einsum, preferred_element_type=_sum_dtype(arrays))
    return dot("...nts,...snh->...tnh", weights.astype(value.dtype), value).astype(value.dtype)


ADDITIVE = Reference(
    attend=additive,
    variants={"": {}},
    tuning={"tile": (5, 4)},
    arguments=lambda rng, sizes: {
        "query_kernel": rng.normal(size=(sizes.heads, sizes.size, 3)),
        "key_kernel": rng.normal(size=(sizes.heads, sizes.size, 3)),
        "score": rng.normal(size=(sizes.heads, 3)),
    },
    per_head=frozenset({"query_kernel", "key_kernel", "score"}),
)

SIGMOID = Reference(
    attend=sigmoid,
    variants={"": {"logit_bias": -2.0}},
    tuning={"tile": (5, 4)},
    normalized=False,
)

SQUARED_RELU = Reference(
    attend=squared_relu,
    variants={"": {"divisor": 7.0}},
    tuning={"tile": (5, 4)},
    normalized=False,
)

SOFTMAX = Reference(attend=softmax, variants={"": {}}, tuning={"tile": (5, 4)})

SLIDING_WINDOW = Reference(
    attend=softmax, variants={"": {"local_window_size": (3, 2)}}, tuning={"tile": (5, 4)}
)

DILATED = Reference(
    attend=softmax,
    variants={"": {"local_window_size": (2, 1), "dilation": 3}},
    tuning={"tile": (5, 4)},
)
