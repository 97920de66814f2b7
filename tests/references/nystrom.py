"""Nystrom attention: three matrices of weights, and the paper's iteration for the middle one."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.references.reference import Reference


def segments(present, num_landmarks):
    """bool `(*B, m, L)`, the tokens of each landmark, of the first `present` of L."""
    count, length = present.sum(-1)[..., None, None], present.shape[-1]
    m = min(num_landmarks, length)
    before = jnp.arange(m + 1)[:, None]
    border = before * (count // m) + jnp.minimum(before, count % m)
    token = jnp.arange(length)
    return (border[..., :-1, :] <= token) & (token < border[..., 1:, :])


def means(x, members):
    """`(*B, N, m, H)` of `x (*B, L, N, H)`."""
    size = jnp.maximum(members.sum(-1), 1)[..., None, :, None]
    return jnp.einsum("...ml,...lnh->...nmh", members.astype(x.dtype), x) / size.astype(x.dtype)


def weights_of(query, key, rows, columns):
    """softmax of `(*B, N, i, h)` with `(*B, N, j, h)`, of the rows and columns that there are."""
    logits = jnp.einsum("...ih,...jh->...ij", query, key)
    pairs = rows[..., None, :, None] & columns[..., None, None, :]
    # Any finite number keeps an empty row empty.
    weights = jax.nn.softmax(jnp.where(pairs, logits, jnp.finfo(logits.dtype).min), -1)
    return jnp.where(pairs, weights, 0)


def nystrom(arrays, pairs, keep, *, num_landmarks, num_iterations=6, skip_kernel=None, **_):
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    dtype = jnp.promote_types(jnp.result_type(query, value), jnp.float32)
    groups = query.shape[-2] // key.shape[-2]
    scale = arrays.get("scale", query.shape[-1] ** -0.5)
    q, k, v = (x.astype(dtype) for x in (query, key, value))
    q, k, v = scale * q, jnp.repeat(k, groups, -2), jnp.repeat(v, groups, -2)
    # Without a pair, there is no query or no key.
    valid, present = jnp.asarray(pairs.allowed).any(-1), jnp.asarray(pairs.allowed).any(-2)
    of_queries = segments(valid, num_landmarks)
    of_keys = segments(present, num_landmarks)
    q_landmarks, k_landmarks = means(q, of_queries), means(k, of_keys)
    q, k, v = (jnp.moveaxis(x, -2, -3) for x in (q, k, v))
    rows, columns = of_queries.any(-1), of_keys.any(-1)

    a = weights_of(q_landmarks, k_landmarks, rows, columns)
    one = jnp.eye(a.shape[-2], dtype=dtype)
    norm_1, norm_inf = jnp.abs(a).sum(-2).max(-1), jnp.abs(a).sum(-1).max(-1)
    norm = norm_1 * norm_inf
    z = jnp.swapaxes(a, -1, -2) / jnp.where(norm == 0, 1, norm)[..., None, None]
    for _ in range(num_iterations):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    out = weights_of(q, k_landmarks, valid, columns) @ (
        z @ (weights_of(q_landmarks, k, rows, present) @ v)
    )
    if skip_kernel is not None:
        width = skip_kernel.shape[-1]
        kernel = jnp.repeat(jnp.asarray(skip_kernel, dtype), q.shape[-3] // len(skip_kernel), 0)
        at = np.arange(v.shape[-2])
        ahead = at - at[:, None] + width // 2
        taps = jnp.where((0 <= ahead) & (ahead < width), kernel[:, ahead % width], 0)
        skipped = jnp.where(present[..., None, :, None], v, 0)
        out = out + jnp.where(valid[..., None, :, None], taps @ skipped, 0)
    return {"out": jnp.moveaxis(out, -3, -2).astype(value.dtype)}


NYSTROM = Reference(
    attend=nystrom,
    variants={
        "": {"num_landmarks": 4},
        "skip": {
            "num_landmarks": 3,
            "skip_kernel": np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32),
        },
        "more landmarks than queries": {"num_landmarks": 9},
    },
    tuning={"tile": (5, 4)},
    least_tokens=4,
)
