"""selective_attention: the paper's pseudo-code, its limit, memory, and refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import SelectiveSelfAttention


def heads(time=11, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, time, n, 8)).astype(dtype) for n in (4, 2, 2, 1, 1)]


def attend(query, key, value, selection_query, selection_key, **options):
    return effattn.selective_attention(
        query,
        key,
        value,
        selection_query=selection_query,
        selection_key=selection_key,
        **options,
    )


def by_the_paper(query, key, value, selection_query, selection_key):
    """The pseudo-code of the paper's first section, in NumPy."""
    time, size = query.shape[1], query.shape[-1]
    key, value = (x.repeat(2, 2) for x in (key, value))
    causal = np.tril(np.ones((time, time), bool))
    logits = np.einsum("btnh,bsnh->bnts", query, key) / size**0.5
    logits = np.where(causal, logits, -np.inf)
    scores = np.einsum("bth,bsh->bts", selection_query[:, :, 0], selection_key[:, :, 0])
    scores = np.maximum(np.where(causal, scores / size**0.5, -np.inf), 0)
    scores[..., 0] = 0  # do not mask the first token
    scores = (1 - np.eye(time)) * scores  # do not mask the own token
    scores = np.roll(scores, 1, -2)  # mask for later tokens alone
    scores[..., 0, :] = 0
    logits = logits - np.cumsum(scores, -2)[:, None]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, value)


def test_it_is_the_pseudo_code_of_the_paper():
    with jax.enable_x64(True):
        given = heads(dtype=np.float64)
        out = jax.jit(functools.partial(attend, key_tile=4))(*given)
    np.testing.assert_allclose(out, by_the_paper(*given), rtol=1e-10, atol=1e-12)


def test_without_selection_it_is_exact_attention():
    query, key, value, of_query, of_key = heads()
    out = jax.jit(attend)(query, key, value, 0 * of_query, of_key)
    exact = effattn.dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)


def test_no_array_has_a_row_for_each_pair():
    x = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    one = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)

    def run(*given):
        out, back = jax.vjp(functools.partial(attend, key_tile=64), *given)
        return back(out)

    text = str(jax.make_jaxpr(run)(x, x, x, one, one))
    assert "4096,64" in text or "4096,2,1,64" in text
    assert "4096,4096" not in text and "4096,2,1,4096" not in text


def test_the_layer_selects_by_its_first_head():
    mixer = SelectiveSelfAttention(16, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(2, 11, 16)).astype(np.float32)
    query, key, value = (layer(x) for layer in (mixer.query, mixer.key, mixer.value))
    expected = attend(query, key, value, query[..., :1, :], key[..., :1, :])
    np.testing.assert_allclose(mixer(x), mixer.out(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: np.zeros((2, 11, 2, 8))}, r"selection_query must be floating point of shape \(2, 11,"),
        ({4: np.zeros((2, 11, 1, 4))}, r"selection_key must be floating point of shape .* 1, 8\)"),
        (
            {3: np.zeros((2, 11, 1, 0))},
            r"selection_query must be floating .* 1, 1\), got .* 1, 0\)",
        ),
        ({0: np.zeros((2, 5, 4, 8))}, "query and key need the same length"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    given = [change.get(n, x) for n, x in enumerate(heads())]
    with pytest.raises(ValueError, match=message):
        attend(*given)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="key_tile must be an int, 1 or more keys, or None, got 0"):
        attend(*heads(), key_tile=0)
    with pytest.raises(ValueError, match="SelectiveSelfAttention has no option selection_key"):
        SelectiveSelfAttention(16, 4, selection_key=1, rngs=nnx.Rngs(0))
