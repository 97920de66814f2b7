"""Zero and the smallest sizes, through the mixers of all mechanisms.

Shapes alone are tested, because the failures at such sizes come before any computation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import registry
from effattn.nn import TransformerConfig, TransformerLM
from tests.cases import MIXERS
from tests.marks import slow, slow_but_for

DIRECTIONS = {"causal": True, "bidirectional": False}
# One mechanism of each core and family.
QUICK = frozenset(
    {
        *("softmax", "sliding_window", "hierarchical", "native_sparse", "linear", "delta_product"),
        *("mamba", "linformer", "lsh", "rwkv4", "hyena", "mixture_of_mechanisms"),
    }
)
CASES = [
    pytest.param(
        name,
        causal,
        id=f"{name}-{direction}",
        marks=() if name in QUICK else pytest.mark.slow,
    )
    for name in registry.names()
    for direction, causal in DIRECTIONS.items()
    if direction in registry.get(name).capabilities
]
# By default these mechanisms need more tokens, and their messages say so.
FEW: dict[str, dict[str, Any]] = {
    "bigbird": {"num_random_blocks": 0},
    "random": {"num_random_blocks": 0},
    "nystrom": {"num_landmarks": 1},
    "routing": {"num_clusters": 1, "cluster_size": 1},
}
SHAPES = [(0, 5), (2, 0), (0, 0), (1, 1)]

every = pytest.mark.parametrize(("name", "causal"), CASES)


def build(name, causal, features=8, heads=2):
    options = FEW.get(name, {})
    if name in MIXERS:
        options = dict(next(iter(MIXERS[name].variants.values())))
    entry = registry.get(name)
    return entry.build(features, heads, is_causal=causal, rngs=nnx.Rngs(0), **options)


def abstract(*args, **kwargs):
    return jax.eval_shape(lambda: build(*args, **kwargs))


def padded(name, causal, rows, length):
    """No padding, and each kind of padding that the mechanism claims."""
    yield {}
    if "lengths" in registry.get(name).capabilities:
        yield {"lengths": np.zeros(rows, np.int32)}
    if "segments" in registry.get(name).capabilities:
        yield {"segment_ids": np.ones((rows, length), np.int32)}


def shapes_of(mixer, x, given):
    """Shapes of the outputs and of the gradients of parameters and tokens."""

    def run(mixer, x):
        y, pull_back = jax.vjp(lambda m, x: m(x, **given), mixer, x)
        return y, pull_back(y)

    return jax.eval_shape(run, mixer, x)


@every
def test_no_rows_and_no_tokens(name, causal):
    mixer = abstract(name, causal)
    for rows, length in SHAPES:
        x = jax.ShapeDtypeStruct((rows, length, 8), jnp.float32)
        for given in padded(name, causal, rows, length):
            y, (of_mixer, of_x) = shapes_of(mixer, x, given)
            assert y.shape == of_x.shape == x.shape
            assert jax.tree.structure(of_mixer) == jax.tree.structure(mixer)


@every
@pytest.mark.parametrize(("features", "heads"), [(1, 1), slow(2, 2), slow(2, 1)])
def test_the_smallest_layers(name, causal, features, heads):
    if name in ("convolution_attention", "differential", "h3"):
        features *= 2  # these mechanisms halve the features, or have heads of two
    mixer = abstract(name, causal, features, heads)
    for rows, length in [(1, 1), (2, 3)]:
        x = jax.ShapeDtypeStruct((rows, length, features), jnp.float32)
        y, (_, of_x) = shapes_of(mixer, x, {})
        assert y.shape == of_x.shape == x.shape
        if causal and "decode" in registry.get(name).capabilities:

            def extend(mixer, x, rows=rows, length=length):
                return mixer.extend(x, mixer.init_state(rows, length))

            y, state = jax.eval_shape(extend, mixer, x)
            assert y.shape == x.shape and state.length.shape == (rows,)


@pytest.mark.parametrize("name", slow_but_for(QUICK, registry.names("decode")))
def test_decoding_no_rows_and_no_room(name):
    mixer = abstract(name, True)

    def extend(mixer, x, max_length, lengths=None):
        state = mixer.init_state(x.shape[0], max_length)
        y, after = mixer.extend(x, state, lengths=lengths)
        same = jax.tree.map(lambda a, b: a.shape == b.shape, state, after)
        assert all(jax.tree.leaves(same)) and y.shape == x.shape
        return y

    for length in (1, 5):
        jax.eval_shape(lambda m, x: extend(m, x, 5), mixer, jnp.ones((0, length, 8)))
    nothing = np.zeros(2, np.int32)
    # A state that grows by tokens has no room here, but no token is added to it.
    jax.eval_shape(lambda m, x: extend(m, x, 0, nothing), mixer, jnp.ones((2, 1, 8)))
    for rows in (0, 2):
        with pytest.raises(ValueError, match="there must be at least one token"):
            jax.eval_shape(lambda m, x: extend(m, x, 4), mixer, jnp.ones((rows, 0, 8)))


@pytest.mark.parametrize("name", ["softmax", "mamba", "gru", "rwkv7", "hyena", "s4"])
def test_models_take_no_rows_and_no_tokens(name):
    config = TransformerConfig(5, 1, 8, 2, mixer=name, max_length=8, dropout_rate=0.5)
    model = jax.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    for shape in SHAPES:
        tokens = np.zeros(shape, np.int32)
        for given in ({}, {"lengths": np.zeros(shape[0], np.int32)}, {"rngs": jax.random.key(0)}):
            logits = jax.eval_shape(lambda m, given=given, tokens=tokens: m(tokens, **given), model)
            assert logits.shape == (*shape, 5)


@pytest.mark.parametrize("name", ["gru", "mamba", "retention"])
def test_one_token_of_one_feature_is_finite(name):
    """These computed cases are the smallest that once failed."""
    mixer = build(name, True, 1, 1)
    y, gradient = jax.jit(jax.value_and_grad(lambda m, x: jnp.sum(m(x))))(
        mixer, jnp.ones((1, 1, 1))
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((y, gradient)))
