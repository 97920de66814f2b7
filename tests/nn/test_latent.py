"""Latent attention: agreement with DeepSeek-V2 of transformers, its cache, wrong options."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.analysis import cost
from effattn.nn import LatentAttention, RotaryEmbedding

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "softmax_variants.npz"
CASES = ["query_latent", "plain_query"]
SIZES = {"head_dim": 6, "value_dim": 5, "rotary_dim": 4, "kv_rank": 8}
HEADS, FEATURES = 3, 24
QUERY, RANK, PART = HEADS * (6 + 4), SIZES["kv_rank"], SIZES["rotary_dim"]


@functools.cache
def golden(case):
    with np.load(GOLDEN) as arrays:
        return {
            name.removeprefix(f"{case}/"): arrays[name]
            for name in arrays.files
            if name.startswith(case)
        }


@functools.cache
def loaded(case):
    """The layer with the parameters of transformers; there, rotary pairs are neighbours."""
    given = golden(case)
    rank = len(given["q_a_layernorm.weight"]) if case == "query_latent" else None
    layer = LatentAttention(FEATURES, HEADS, query_rank=rank, **SIZES, rngs=nnx.Rngs(0))
    halves = np.r_[0:PART:2, 1:PART:2]
    name = "q_proj.weight" if rank is None else "q_b_proj.weight"
    query = given[name].reshape(HEADS, 6 + PART, -1)
    query = np.concatenate([query[:, :6], query[:, 6:][:, halves]], 1)
    both = given["kv_b_proj.weight"].reshape(HEADS, 6 + 5, RANK)
    down = given["kv_a_proj_with_mqa.weight"]
    kernels = {
        "query": query.transpose(2, 0, 1),
        "latent": down[:RANK].T,
        "rotary_key": down[RANK:][halves].T,
        "key": both[:, :6].transpose(2, 0, 1),
        "value": both[:, 6:].transpose(2, 0, 1),
        "out": given["o_proj.weight"].T.reshape(HEADS, 5, FEATURES),
    }
    scales = {"latent_norm": given["kv_a_layernorm.weight"]}
    if rank is not None:
        kernels["query_latent"] = given["q_a_proj.weight"].T
        scales["query_norm"] = given["q_a_layernorm.weight"]
    for name, kernel in kernels.items():
        assert getattr(layer, name).kernel.shape == kernel.shape
        getattr(layer, name).kernel[...] = kernel
    for name, scale in scales.items():
        getattr(layer, name).scale[...] = scale
    return layer


@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_deepseek_v2_of_transformers(case):
    given = golden(case)

    @nnx.jit
    def run(layer, x, cotangent):
        y, pull_back = jax.vjp(layer, x)
        return y, pull_back(cotangent)[0]

    y, gradient = run(loaded(case), given["x"], given["cotangent"])
    np.testing.assert_allclose(y, given["output"], atol=1e-5)
    np.testing.assert_allclose(gradient, given["gradient"], atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_absorbed_form_decodes_what_transformers_computes(case):
    given, layer = golden(case), loaded(case)
    extend = nnx.jit(lambda layer, x, state: layer.extend(x, state))
    state, outputs = layer.init_state(2, 11), []
    for part in np.split(given["x"], [6, 7, 8], 1):
        y, state = extend(layer, part, state)
        outputs.append(y)
    np.testing.assert_allclose(np.concatenate(outputs, 1), given["output"], atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_cache_holds_the_latent_and_the_rotary_key_alone(dtype):
    layer = LatentAttention(64, 8, kv_rank=16, rotary_dim=6, rngs=nnx.Rngs(0))
    rows, room = 3, 40
    state = layer.init_state(rows, room, dtype)
    assert sum(x.nbytes for x in jax.tree.leaves(state.tokens)) == (
        rows * room * (16 + 6) * jnp.dtype(dtype).itemsize
    )
    assert [x.shape for x in jax.tree.leaves(state)] == [(rows, room, 16), (rows, room, 6), (rows,)]


def test_decoding_never_expands_the_cache():
    """A step makes no array of the cached tokens that has heads, for its keys or its values."""
    layer = LatentAttention(64, 8, kv_rank=16, rotary_dim=6, rngs=nnx.Rngs(0))
    room = 4096
    state = jax.eval_shape(lambda: layer.init_state(1, room))
    program = jax.make_jaxpr(lambda m, x, state: m.extend(x, state))(
        layer, jnp.ones((1, 1, 64)), state
    )
    assert cost.largest(program) == room * (16 + 6)


def test_sizes_of_the_paper_are_the_defaults():
    """The latent has 4 H numbers, and the rotary part H / 2."""
    layer = nnx.eval_shape(lambda: LatentAttention(512, 8, rngs=nnx.Rngs(0)))
    assert (layer.head_dim, layer.value_dim, layer.kv_rank, layer.rotary_dim) == (64, 64, 256, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_rank": 9}, "kv_rank must be at most the 8 features of a token, got 9"),
        ({"query_rank": 0}, "query_rank must be an int, 1 or more"),
        ({"query_rank": 10}, "query_rank must be at most the 8 features of a token, got 10"),
        ({"rotary_dim": 3}, "rotary_dim must be even, for pairs of features, got 3"),
        ({"rotary_dim": 0}, "rotary_dim must be an int, 2 or more"),
        ({"value_dim": 0}, "value_dim must be an int, 1 or more"),
        (
            {"rotary": RotaryEmbedding(features=6), "rotary_dim": 4},
            "rotary rotates 6 features, but rotary_dim is 4; give a larger rotary_dim",
        ),
        ({"rotary": True}, "rotary must be a RotaryEmbedding or None, got True"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1 was given, but attention 'latent' lacks"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LatentAttention(8, 2, **options, rngs=nnx.Rngs(0))


def test_a_state_of_another_layer_is_refused():
    make = functools.partial(LatentAttention, 8, 2, rngs=nnx.Rngs(0))
    state = make(kv_rank=4).init_state(1, 5)
    with pytest.raises(ValueError, match="it is the state of another layer"):
        make(kv_rank=6).extend(jnp.ones((1, 1, 8)), state)
