"""Softmax attention over any pairs, with all that the block core takes."""

import functools

import jax
import jax.numpy as jnp

from tests.references.pairs import Pairs
from tests.references.reference import Reference


def softmax(
    arrays, pairs: Pairs, keep, *, score_mod=None, logits_soft_cap=None, dropout_rate=0.0, **_
):
    """The definition, in as many steps as it has."""
    query, value = arrays["query"], arrays["value"]
    groups = query.shape[-2] // value.shape[-2]
    key, value = (jnp.repeat(x, groups, -2) for x in (arrays["key"], value))
    dtype = functools.reduce(jnp.promote_types, (query.dtype, value.dtype, jnp.float32))
    dot = functools.partial(jnp.einsum, preferred_element_type=dtype)

    scale = arrays.get("scale", query.shape[-1] ** -0.5)
    logits = scale * dot("...tnh,...snh->...nts", query, key)
    if "bias" in arrays:
        logits = logits + arrays["bias"]
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if score_mod is not None:
        *batch, heads, _, keys = logits.shape
        b = jnp.arange(logits[..., 0, 0, 0].size).reshape(*batch, 1, 1, 1)
        h = jnp.arange(heads)[:, None, None]
        i = pairs.position[..., None, :, None]
        logits = score_mod(logits, b, h, i, jnp.arange(keys)).astype(dtype)
    logits = jnp.where(pairs.allowed[..., None, :, :], logits, -jnp.inf)
    if "sink" in arrays:
        sink = arrays["sink"].astype(dtype)[:, None, None]
        sink = jnp.where(pairs.valid[..., None, :, None], sink, -jnp.inf)
        logits = jnp.concatenate([logits, sink], -1)

    # The largest logit of an empty row is -inf, and any number in its place keeps the row empty.
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(logits - largest)
    total = weights.sum(-1, keepdims=True)
    is_empty, total = total == 0, jnp.where(total == 0, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, jnp.log(total) + largest)
    weights = (weights / total)[..., : key.shape[-3]]
    if keep is not None:
        weights = jnp.where(keep, weights / (1 - dropout_rate), 0)
    out = dot("...nts,...snh->...tnh", weights.astype(value.dtype), value).astype(value.dtype)
    return {"out": out, "lse": jnp.moveaxis(lse[..., 0], -2, -1)}


SOFTMAX = Reference(attend=softmax, variants={"": {}}, tuning={"tile": (5, 4)})

SLIDING_WINDOW = Reference(
    attend=softmax, variants={"": {"local_window_size": (3, 2)}}, tuning={"tile": (5, 4)}
)

DILATED = Reference(
    attend=softmax,
    variants={"": {"local_window_size": (2, 1), "dilation": 3}},
    tuning={"tile": (5, 4)},
)
