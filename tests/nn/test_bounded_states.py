"""A state of the last tokens holds no more tokens than a row may have."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn import registry
from effattn.nn import (
    BasedSelfAttention,
    DilatedConvolution,
    LongformerSelfAttention,
    RecurrentMemoryAttention,
    RotaryEmbedding,
    RoutingSelfAttention,
    SelfAttention,
    TransformerConfig,
    TransformerLM,
    TransformerXLAttention,
)
from tests.nn.build import filled, floats

LENGTH = 7
WIDE = {
    "window": lambda **options: SelfAttention(
        16, 4, "sliding_window", local_window_size=(10**5, 0), rotary=RotaryEmbedding(), **options
    ),
    "longformer": lambda **options: LongformerSelfAttention(
        16, 4, local_window_size=(10**5, 0), max_global=10**5, **options
    ),
    "longformer, global tokens alone": lambda **options: LongformerSelfAttention(
        16, 4, local_window_size=(2, 0), max_global=10**5, **options
    ),
    "longformer, first tokens": lambda **options: LongformerSelfAttention(
        16, 4, local_window_size=(2, 0), global_tokens=10**5, global_projections=True, **options
    ),
    "routing beside a window": lambda **options: RoutingSelfAttention(
        16,
        4,
        cluster_size=10**5,
        local_window_size=10**5,
        num_local_heads=2,
        num_clusters=2,
        **options,
    ),
    "based": lambda **options: BasedSelfAttention(
        16, 4, feature_dim=4, local_window_size=(10**5, 0), **options
    ),
    "memory": lambda **options: RecurrentMemoryAttention(
        16, 4, segment_size=64, num_slots=3, **options
    ),
    "Transformer-XL": lambda **options: TransformerXLAttention(
        16, 4, segment_size=3, memory_size=64, **options
    ),
    "convolution": lambda **options: DilatedConvolution(16, width=3, dilation=10**5, **options),
    "convolution, partly wide": lambda **options: DilatedConvolution(
        16, width=3, dilation=4, **options
    ),
}


@pytest.fixture(params=WIDE)
def mixer(request):
    return filled(lambda: WIDE[request.param](rngs=nnx.Rngs(0)))


def test_the_state_is_small_and_decodes(mixer):
    state = jax.eval_shape(lambda: mixer.init_state(2, LENGTH))
    assert max(max(leaf.shape) for leaf in jax.tree.leaves(state)) < 64
    x = floats(2, LENGTH, 16)
    whole = jax.jit(lambda m: m(x))(mixer)
    extend = jax.jit(lambda m, x, state: m.extend(x, state))
    first, state = extend(mixer, x[:, :4], mixer.init_state(2, LENGTH))
    parts = [first]
    for t in range(4, LENGTH):
        y, state = extend(mixer, x[:, t : t + 1], state)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match=f"holds at most {LENGTH} tokens a row, got {LENGTH + 1}"):
        mixer.step(x[:, :1], state)


def test_the_state_of_another_layer_is_refused(mixer):
    """The given state belongs to a layer with one more row, or with other features."""
    state = jax.eval_shape(lambda: mixer.init_state(3, LENGTH))
    with pytest.raises(ValueError, match="call init_state with batch=2"):
        jax.eval_shape(mixer.extend, floats(2, 1, 16), state)
    state = jax.eval_shape(lambda: mixer.init_state(2, LENGTH))
    other = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct((*leaf.shape[:-1], leaf.shape[-1] + 1), leaf.dtype)
            if leaf.ndim > 1
            else leaf
        ),
        state,
    )
    with pytest.raises(ValueError, match="state"):
        jax.eval_shape(mixer.extend, floats(2, 1, 16), other)


def test_a_window_that_is_wide_enough_has_no_end():
    mixer = filled(
        lambda: SelfAttention(16, 4, "sliding_window", local_window_size=(3, 0), rngs=nnx.Rngs(0))
    )
    x = floats(2, 9, 16)
    y, _ = jax.jit(lambda m, x: m.extend(x, m.init_state(2, 4)))(mixer, x)
    np.testing.assert_allclose(y, jax.jit(lambda m: m(x))(mixer), rtol=1e-5, atol=1e-6)


def test_a_model_of_wide_windows_holds_what_it_is_asked_for():
    window = {"name": "sliding_window", "local_window_size": (100_000, 0)}
    config = TransformerConfig(vocab_size=13, num_layers=2, features=64, num_heads=2, mixer=window)
    model = jax.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    state = jax.eval_shape(lambda model: model.init_state(1, 128), model)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert size <= 2 * 2 * 128 * 64 * 4 + 100


SPARSE = {"block_size": 4, "num_selected": 3, "window_size": 5, "compression_stride": 2}
OTHERS = {
    "moba": ({"block_size": 2, "top_k": 2}, {"block_size": 4, "top_k": 2}),
    "learned_blocks": ({"block_size": 2, "top_k": 2}, {"block_size": 4, "top_k": 2}),
    "native_sparse": (
        {"compression_size": 2, **SPARSE},
        {"compression_size": 4, **SPARSE},
    ),
    "rg_lru": ({"first_in_full": False}, {"first_in_full": True}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_a_layer_with_other_options_is_refused(name):
    one, other = (
        registry.get(name).build(16, 4, rngs=nnx.Rngs(0), **options) for options in OTHERS[name]
    )
    for mixer, given in ((one, other), (other, one)):
        state = jax.eval_shape(lambda given=given: given.init_state(2, 16))
        with pytest.raises(ValueError, match="state"):
            jax.eval_shape(mixer.extend, floats(2, 3, 16), state)
