"""LSH attention by the definition of what each token sees in each round."""

import math

import jax
import jax.numpy as jnp


def bucket(query_key, rotations, factors):
    """`(T,)` of one head's `(T, H)`, by one round's `(H, columns)`."""
    found, scale = 0, 1
    for factor in factors:
        rotation, rotations = rotations[:, : factor // 2], rotations[:, factor // 2 :]
        rotated = query_key @ rotation
        found = found + scale * jnp.concatenate([rotated, -rotated], -1).argmax(-1)
        scale = scale * factor
    return found + jnp.zeros(query_key.shape[0], int)


def sees(bucket, chunk_length, is_causal):
    """bool `(T, T)`: which keys a query sees in one round."""
    length = bucket.shape[0]
    rank = jnp.argsort(jnp.argsort(bucket, stable=True))
    if is_causal:
        same = bucket[:, None] == bucket
        past = jnp.tril(jnp.ones((length, length), bool), -1)
        behind = rank[:, None] - rank
        return same & past & (behind <= chunk_length)
    chunk, chunks = rank // chunk_length, math.ceil(length / chunk_length)
    before = (chunk - 1) % chunks
    return (chunk[:, None] == chunk) | (before[:, None] == chunk)


def lsh(query_key, value, rotations, factors, chunk_length, is_causal):
    """The output `(T, Hv)` and the log-sum-exp `(T,)` of one head; rotations `(n, H, columns)`."""
    wide = jnp.promote_types(query_key.dtype, jnp.float32)
    any_round = False
    for rotation in rotations:
        of_round = bucket(query_key.astype(wide), rotation.astype(wide), factors)
        any_round |= sees(of_round, chunk_length, is_causal)
    any_round &= ~jnp.eye(len(value), dtype=bool)
    itself = jnp.eye(len(value), dtype=bool) & ~any_round.any(-1, keepdims=True)
    key = query_key / jnp.sqrt((query_key**2).mean(-1, keepdims=True) + 1e-6)
    logits = (query_key @ key.T).astype(wide) * query_key.shape[-1] ** -0.5
    logits = jnp.where(any_round, logits, jnp.where(itself, -1e5, -jnp.inf))
    weights = jax.nn.softmax(logits)
    return weights.astype(value.dtype) @ value, jax.nn.logsumexp(logits, -1)


def turned(x, theta):
    """Features m and m + H / 2 of `(T, N, H)` as a complex number, times e^(i t theta^(-2m/H))."""
    time, _, size = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    first, second = jnp.split(x.astype(wide), 2, -1)
    angle = jnp.outer(jnp.arange(time), theta ** (-jnp.arange(0, size, 2, wide) / size))
    z = (first + 1j * second) * jnp.exp(1j * angle)[:, None]
    return jnp.concatenate([z.real, z.imag], -1).astype(x.dtype)


def mix(mixer, x):
    def project(layer):
        return jnp.einsum("td,dnh->tnh", x, layer.kernel[...])

    query_key, value = project(mixer.query_key), project(mixer.value)
    if mixer.rotary is not None:
        query_key = turned(query_key, mixer.rotary.theta)
    heads = [
        lsh(
            query_key[:, n],
            value[:, n],
            mixer.rotations[n],
            mixer.factors,
            mixer.chunk_length,
            mixer.is_causal,
        )[0]
        for n in range(mixer.num_heads)
    ]
    return jnp.einsum("tnh,nhd->td", jnp.stack(heads, 1), mixer.out.kernel[...])
