"""Linformer attention: its projections and their gradients, and refused arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import linformer_attention
from effattn.functional.linformer import window_projection
from effattn.nn import CrossAttention, SelfAttention, as_attention_fn
from effattn.testing.functions import assert_close
from tests.dense import draw, with_gradients
from tests.marks import slow

QUERIES, KEYS, ROWS, LONGEST = 11, 14, 5, 16
LENGTHS = {"query_seq_lengths": np.array([11, 7]), "key_value_seq_lengths": np.array([9, 0])}


def drawn(*before):
    rng = np.random.default_rng(0)
    of_keys, of_values = rng.normal(size=(2, *before, ROWS, LONGEST)) / 4
    return {"key_projection": of_keys, "value_projection": of_values}


@pytest.mark.parametrize("before", [slow(()), (2,)], ids=["shared", "by head"])
def test_projections_have_gradients_that_no_padding_reaches(before, x64):
    """NaN in the padding; the second example has no keys, and gives zeros."""
    arrays = draw(QUERIES, KEYS) | drawn(*before)
    for name, end in (("query", "query"), ("key", "key_value"), ("value", "key_value")):
        for row, length in enumerate(LENGTHS[f"{end}_seq_lengths"]):
            arrays[name][row, length:] = np.nan

    def ours(arrays, lengths):
        return linformer_attention(**arrays, **lengths, return_residual=True)

    def naive(arrays, lengths):
        return effattn.naive.linformer(**arrays, **lengths, return_residual=True)

    got = jax.tree.map(np.asarray, with_gradients(ours, arrays, LENGTHS))
    (out, lse), gradients = got
    assert np.isfinite(out).all() and (out[1] == 0).all() and (lse[1] == -np.inf).all()
    assert all(np.isfinite(x).all() for x in gradients.values())
    assert (gradients["key_projection"][..., 9:] == 0).all()
    zeros = {name: np.nan_to_num(x) for name, x in arrays.items()}
    assert_close(got, with_gradients(naive, zeros, LENGTHS), 1e-12)


def test_short_inputs_use_the_leading_columns():
    arrays, whole = draw(QUERIES, KEYS, dtype=np.float32), drawn()
    cut = {name: x[:, :KEYS] for name, x in whole.items()}
    run = jax.jit(linformer_attention)
    np.testing.assert_array_equal(run(**arrays, **whole), run(**arrays, **cut))


def test_no_array_has_all_pairs():
    length = 4096
    one = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.bfloat16)
    projection = jax.ShapeDtypeStruct((16, length), jnp.float32)

    def loss(query, key, value, projection):
        out = linformer_attention(
            query, key, value, key_projection=projection, value_projection=projection
        )
        return out.astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(one, one, one, projection)
    assert compiled.compile().memory_analysis().temp_size_in_bytes < length**2


def test_equal_weights_in_windows_are_mean_pooling():
    arrays, width = draw(6, 12, dtype=np.float32), 3
    pooling = jax.jit(window_projection, static_argnums=1)(np.full(width, 1 / width), 12 // width)
    means = {
        name: arrays[name].reshape(2, 4, width, *arrays[name].shape[2:]).mean(2)
        for name in ("key", "value")
    }
    np.testing.assert_allclose(
        jax.jit(linformer_attention)(**arrays, key_projection=pooling, value_projection=pooling),
        jax.jit(effattn.dot_product_attention)(arrays["query"], **means),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"is_causal": True},
            "needs is_causal=False, got True: each projected row is a sum over the whole",
        ),
        (
            {"segment_ids": np.ones((2, QUERIES), int)},
            "linformer_attention with segment_ids is self-attention: .* got 11 and 14",
        ),
        ({"key_projection": np.ones((5, 13))}, r"for at most 13 tokens, got 14 in key"),
        ({"value_projection": np.ones((4, 16))}, "same number of rows, got 5 and 4"),
        ({"key_projection": np.ones((3, 5, 16))}, r"\(2, rows, max length\), for 2 key heads and"),
        (
            {"key_projection": np.ones((17, 16))},
            r"no more rows than the max length, got .* \(17, 16\)",
        ),
        ({"value_projection": np.ones((5, 16), int)}, "value_projection must be floating point"),
        ({"key_projection": np.ones((0, 16))}, r"key_projection must be .* got float32 of shape"),
        ({"key_projection": np.ones(16)}, r"got float32 of shape \(16,\)"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        linformer_attention(**draw(QUERIES, KEYS), **{**drawn(), **changes})


def test_every_way_to_ask_for_causality_is_told_why_there_is_none():
    def mixer(**options):
        return SelfAttention(8, 4, "linformer", rngs=nnx.Rngs(0), **options)

    for ask in (mixer, lambda: as_attention_fn("linformer", is_causal=True)):
        with pytest.raises(
            ValueError, match="'linformer' lacks 'causal' .* sees later tokens; reg"
        ):
            ask()


def test_generic_modules_take_the_projections_as_parameters():
    x = np.random.default_rng(1).normal(size=(2, KEYS, 8)).astype(np.float32)

    @nnx.jit
    def both_and_gradient():
        params = {name: nnx.Param(jnp.asarray(x, jnp.float32)) for name, x in drawn().items()}
        alone = SelfAttention(8, 4, "linformer", is_causal=False, rngs=nnx.Rngs(0), **params)
        cross = CrossAttention(8, 4, "linformer", rngs=nnx.Rngs(0), **params)
        gradient = nnx.grad(lambda mixer: jnp.sum(mixer(x) ** 2))(alone)
        return alone(x), cross(x, x), gradient

    of_alone, of_cross, gradient = both_and_gradient()
    np.testing.assert_allclose(of_alone, of_cross, rtol=1e-6)
    assert np.any(gradient["array_options"]["key_projection"][...])
