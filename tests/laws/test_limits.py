"""At its extreme each mechanism is another mechanism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.testing import functions
from effattn.testing.functions import SQUARE, Subject
from tests.cases import FUNCTIONS


def exact(query, key, value):
    return effattn.dot_product_attention(query, key, value)


def second_order(x):
    """Features whose products are exp(x . y) up to second order."""
    pairs = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x, pairs * 0.5**0.5], -1)


def taylor(query, key, value):
    """With logits of 1e-5, the third order of the Taylor series is below rounding."""
    root = query.shape[-1] ** -0.25
    query, key = (1e-5**0.5 * x for x in (query, key))
    return effattn.linear_attention(
        root * query, root * key, value, feature_map=second_order
    ), exact(query, key, value)


def wide(query, key, value):
    window = effattn.sliding_window_attention(
        query, key, value, local_window_size=query.shape[-3] - 1
    )
    return window, exact(query, key, value)


def steps_of_everything(query, key, value):
    """With a dilation as long as the sequence, a token sees only itself."""
    lonely = effattn.sliding_window_attention(
        query, key, value, local_window_size=2, dilation=query.shape[-3]
    )
    return lonely, jnp.repeat(value, query.shape[-2] // value.shape[-2], -2)


def as_many_rows_as_keys(query, key, value):
    identity = jnp.eye(key.shape[-3])
    projected = effattn.linformer_attention(
        query, key, value, key_projection=identity, value_projection=identity
    )
    return projected, exact(query, key, value)


def as_many_slots_as_tokens(query, key, value):
    identity = jnp.eye(4)
    slots = effattn.block_linformer_attention(
        query, key, value, key_projection=identity, value_projection=identity
    )
    return slots, effattn.dot_product_attention(query, key, value, is_causal=True)


def a_window_over_one_segment(query, key, value):
    slots = {"window_size": query.shape[-3], "projection": jnp.ones((query.shape[-1], 2))}
    window = effattn.long_short_attention(query, key, value, is_causal=True, **slots)
    return window, effattn.dot_product_attention(query, key, value, is_causal=True)


def one_cluster_with_room_for_all(query, key, value):
    size = query.shape[-1]
    one = {"centroids": jnp.ones((query.shape[-2], 1, size)), "cluster_size": query.shape[-3]}

    def unit(x):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    ours, other = zip(
        *(
            (
                effattn.routing_attention(query, key, value, is_causal=is_causal, **one),
                effattn.dot_product_attention(unit(query), unit(key), value, is_causal=is_causal),
            )
            for is_causal in (False, True)
        ),
        strict=True,
    )
    return jnp.stack(ours), jnp.stack(other)


LIMITS = {
    "a window over all is exact": ("sliding_window", wide),
    "steps past the end leave the token": ("sliding_window", steps_of_everything),
    "as many rows as keys and identities are exact": ("linformer", as_many_rows_as_keys),
    "as many slots as tokens and identities are exact": (
        "block_linformer",
        as_many_slots_as_tokens,
    ),
    "a causal window over one segment is exact": ("long_short", a_window_over_one_segment),
    "one cluster with room for all is exact": ("routing", one_cluster_with_room_for_all),
    "a Taylor series of small logits is exact": ("linear", taylor),
}


@pytest.mark.parametrize(
    ("mechanism", "both"),
    [
        pytest.param(Subject(m, "", FUNCTIONS[m]), both, id=f"{m}-{name}")
        for name, (m, both) in LIMITS.items()
    ],
)
def test_limit(mechanism, both):
    with jax.enable_x64(True):
        arrays = functions.draw_arrays(mechanism, SQUARE, everything=False)
        arrays = {name: arrays[name] for name in ("query", "key", "value")}
        ours, other = jax.jit(both)(**arrays)
        functions.assert_close(ours, np.asarray(other), 1e-12)
