"""Long-short attention: softmax attention over every token and every slot, at once."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.references.reference import Reference
from tests.references.softmax import softmax


def long_short(
    arrays,
    pairs,
    keep,
    *,
    window_size,
    segment_size=None,
    projection=None,
    slot_scores=None,
    window_norm=None,
    slot_norm=None,
    **options,
):
    """Tokens, the slots of the whole and those of each segment, of which a call sees its own."""
    key, value = arrays["key"], arrays["value"]
    length, dtype = key.shape[-3], jnp.promote_types(jnp.result_type(key, value), jnp.float32)
    present = jnp.asarray(pairs.allowed).any(-2)
    key, value = (jnp.where(present[..., None, None], x, 0) for x in (key, value))
    if slot_scores is None:
        w = jnp.broadcast_to(projection, (*key.shape[-2:], np.shape(projection)[-1]))
        slot_scores = jnp.einsum("...skh,khr->...skr", key.astype(dtype), w.astype(dtype))
    slots = slot_scores.shape[-1]
    scores = jnp.broadcast_to(slot_scores, (*key.shape[:-1], slots)).astype(dtype)

    at, size = np.arange(length), segment_size or window_size
    segments = np.arange(-(-length // size))
    members = np.concatenate([at[None] >= 0, at // size == segments[:, None]])
    seen_by_all = (np.arange(len(members)) == 0) == (segment_size is None)
    finished = np.pad(segments < at[:, None] // size, ((0, 0), (1, 0)))

    def normed(x, norm):
        if norm is None:
            return x
        wide = x.astype(dtype)
        variance = wide.var(-1, keepdims=True) + 1e-5
        normal = (wide - wide.mean(-1, keepdims=True)) / jnp.sqrt(variance)
        return (normal * norm[0] + norm[1]).astype(x.dtype)

    of_slots = present[..., None, :] & members  # (*B, M, S)
    where = of_slots[..., None, None]
    weights = jax.nn.softmax(scores[..., None, :, :, :], -3, where=where)

    def with_slots(x):
        """`(*B, S + M r, K, H)`."""
        projected = jnp.einsum("...mskr,...skh->...mrkh", weights, x.astype(dtype))
        projected = projected.reshape(*x.shape[:-3], -1, *x.shape[-2:]).astype(x.dtype)
        return jnp.concatenate([normed(x, window_norm), normed(projected, slot_norm)], -3)

    back = at[:, None] - at
    start = at[:, None] // window_size * window_size
    home = (at >= start - window_size // 2) & (at < start + window_size + window_size // 2)
    near = jnp.where(pairs.is_causal, back < window_size, home)
    seen = jnp.where(pairs.is_causal, finished, seen_by_all)
    seen = seen & of_slots.any(-1)[..., None, :] & jnp.asarray(pairs.valid)[..., None]
    allowed = [pairs.allowed & near, jnp.repeat(seen, slots, -1)]
    if keep is not None:
        # Slots are counted after the tokens, from 0 in each of the two forms.
        of_whole, of_segments = (
            keep[..., length : length + n] for n in (slots, (len(members) - 1) * slots)
        )
        keep = jnp.concatenate([keep[..., :length], of_whole, of_segments], -1)
    arrays = {**arrays, "key": with_slots(key), "value": with_slots(value)}
    pairs = pairs._replace(allowed=jnp.concatenate(allowed, -1))
    return softmax(arrays, pairs, keep, **options)


def _draw(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


LONG_SHORT = Reference(
    attend=long_short,
    variants={
        "": {"window_size": 3, "segment_size": 4, "projection": _draw(6, 2)},
        "scores": {"window_size": 4, "slot_scores": _draw(17, 2, 3)},
    },
    tuning={"tile": (5, 4)},
    module={"window_size": 3, "segment_size": 4, "num_projected": 2},
    more_keys=15,
)
