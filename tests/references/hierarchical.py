"""Hierarchical attention: softmax attention over every token and every piece of a unit, at once."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.references.reference import Reference
from tests.references.softmax import softmax


def runs_and_queries(length, segment_size, num_levels, num_summaries):
    """bool `(P, S)`, the tokens of each run, and `(T, P)`, the runs meant for each query."""
    at = np.arange(length)
    members, meant = [np.eye(length, dtype=bool)], [same_unit(at, at, segment_size)]
    for level in range(1, num_levels + 1):
        unit = segment_size * 2 ** (level - 1)
        size = unit // num_summaries
        first = np.arange(0, length, size)
        others = ~same_unit(at, first, unit)
        if level < num_levels:
            others &= same_unit(at, first, 2 * unit)
        members.append(same_unit(first, at, size))
        meant.append(others)
    return np.concatenate(members), np.concatenate(meant, 1)


def same_unit(a, b, size):
    return a[:, None] // size == b // size


def hierarchical(
    arrays,
    pairs,
    keep,
    *,
    segment_size,
    num_levels=1,
    num_summaries=1,
    summary_query=None,
    **options,
):
    """The summaries are keys and values like the tokens, of a logit with log n added."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    dtype = jnp.promote_types(jnp.result_type(query, value), jnp.float32)
    which = runs_and_queries(key.shape[-3], segment_size, num_levels, num_summaries)
    members, meant = map(jnp.asarray, which)

    present = pairs.allowed.any(-2)[..., None, :] & members  # (*B, P, S)
    count = present.sum(-1)
    logits = jnp.zeros((*key.shape[:-2], 1), dtype)
    if summary_query is not None:
        scale = arrays.get("scale", query.shape[-1] ** -0.5)
        logits = scale * (key.astype(dtype) * summary_query.astype(dtype)).sum(-1)
    logits = jnp.moveaxis(logits, -1, -2)[..., None, :]  # (*B, K, 1, S)
    weights = jax.nn.softmax(logits, where=present[..., None, :, :], axis=-1)
    keys, values = (
        jnp.einsum("...kps,...skh->...pkh", jnp.broadcast_to(weights, (*a, *weights.shape[-2:])), x)
        for x in (key, value)
        for a in [(*x.shape[:-3], x.shape[-2])]
    )
    # Causal: of a run of others, no token is ahead, or all are.
    reached = jnp.einsum("...ts,ps->...tp", pairs.allowed.astype(int), members.astype(int)) > 0
    if keep is not None:
        last = jnp.argmax(jnp.where(present, jnp.arange(key.shape[-3]), -1), -1)
        keep = jnp.take_along_axis(keep, last[..., None, None, :], -1)
    log_count = jnp.log(jnp.maximum(count, 1))[..., None, None, :]
    return softmax(
        {**arrays, "key": keys.astype(key.dtype), "value": values.astype(value.dtype)},
        pairs._replace(allowed=reached & meant),
        keep,
        score_mod=lambda logit, b, h, i, j: logit + log_count,
        **options,
    )


HIERARCHICAL = Reference(
    attend=hierarchical,
    variants={
        "": {"segment_size": 4, "num_levels": 1, "num_summaries": 2},
        "levels": {"segment_size": 2, "num_levels": 3, "num_summaries": 1},
    },
    tuning={"tile": (5, 4)},
)
