"""LunaSelfAttention: its projections and its activation in each direction."""

import jax
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import LunaSelfAttention
from tests.nn.build import filled, floats

X = floats(2, 9, 16)


def make(**options):
    return LunaSelfAttention(16, 4, num_packed=3, num_kv_heads=2, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(("is_causal", "activation"), [(True, "elu"), (False, "softmax")])
def test_the_activation_is_that_of_the_paper(is_causal, activation):
    mixer = filled(lambda: make(is_causal=is_causal), spread=1 / 2)
    query, key, value, pack_key = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value, mixer.pack_key)
    )
    out = effattn.luna_attention(
        query,
        key,
        value,
        pack_query=mixer.pack_query[...],
        pack_key=pack_key,
        activation=activation,
        is_causal=is_causal,
    )
    y = np.einsum("btnh,nhd->btd", out, mixer.out.kernel[...])
    np.testing.assert_allclose(jax.jit(lambda m: m(X))(mixer), y, rtol=1e-4, atol=1e-5)


def test_a_state_has_a_fixed_size():
    """l (H + Hv) + 1 numbers for each key head, for any number of tokens."""
    state = make().init_state(1, 1000, np.float32).state
    assert sum(x.size for x in jax.tree.leaves(state)) == 2 * (3 * (4 + 4) + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_packed": 0}, "num_packed must be an int, 1 or more vectors, got 0"),
        ({"pack_query": X}, "LunaSelfAttention has no option pack_query; it learns the pack"),
        ({"pack_key": X}, "LunaSelfAttention has no option pack_key; it learns the pack"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LunaSelfAttention(16, 4, **options, rngs=nnx.Rngs(0))
