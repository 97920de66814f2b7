"""Synthesizers are attention with weights that no pair of tokens decides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import Synthesizer
from tests.closeness import close
from tests.nn.build import filled

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)
D = X.shape[-1]


def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


def test_a_factorized_synthesizer_weighs_by_products_of_its_factors():
    heads = 2
    coarse, fine, value = (
        RNG.normal(size=(2, 9, heads, size)).astype(np.float32) for size in (3, 4, 5)
    )
    logits = np.einsum("btna,btnc->btnac", coarse, fine).reshape(2, 9, heads, 12)[..., :9]
    for is_causal in (True, False):
        seen = np.tri(9, dtype=bool) if is_causal else np.ones((9, 9), bool)
        weights = jax.nn.softmax(np.where(seen[:, None], logits, -np.inf), -1)
        run = compiled(effattn.factorized_synthesizer_attention, is_causal=is_causal)
        y = run(coarse, fine, value)
        close(y, np.einsum("btns,bsnh->btnh", weights, value))


def test_what_is_in_the_padding_of_a_factorised_synthesizer_reaches_nothing():
    shown = np.arange(9)[:, None, None] < np.array([4, 0])[:, None, None, None]
    arrays = [RNG.normal(size=(2, 9, 2, 3)).astype(np.float32) for _ in range(3)]

    @jax.jit
    def run(arrays):
        def mix(*arrays):
            return effattn.factorized_synthesizer_attention(*arrays, lengths=np.array([4, 0]))

        y, pull_back = jax.vjp(mix, *arrays)
        return y, pull_back(y)

    clean = run([np.where(shown, x, 0) for x in arrays])
    dirty = run([np.where(shown, x, np.nan) for x in arrays])
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_a_dense_synthesizer_is_attention_to_learned_keys():
    hidden, value = (RNG.normal(size=(2, 9, 2, 4)).astype(np.float32) for _ in range(2))
    table = RNG.normal(size=(9, 2, 4)).astype(np.float32)
    keys = np.broadcast_to(table, hidden.shape)
    exact = compiled(effattn.dot_product_attention, scale=1.0, is_causal=True)
    ours = compiled(effattn.synthesizer_attention, is_causal=True)
    close(ours(hidden, table, value), exact(hidden, keys, value))


def test_tables_that_are_not_trained_have_no_gradient():
    for kind in ("random", "factorized_random"):

        def make(kind=kind):
            return Synthesizer(D, 2, kind=kind, max_length=9, trained=False, rngs=nnx.Rngs(0))

        layer = filled(make)
        gradient = jax.jit(jax.grad(lambda m: jnp.sum(m(X) ** 2)))(layer)
        assert not np.any(gradient.table[...]) and np.any(gradient.value.kernel[...])
        assert not isinstance(layer.table, nnx.Param)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.synthesizer_attention(
                np.ones((2, 9, 2, 3)), np.ones((9, 2, 4)), np.ones((2, 9, 2, 3))
            ),
            r"table must have shape \(S, N, A\) for hidden",
        ),
        (
            lambda: effattn.synthesizer_attention(
                np.ones((2, 9, 2, 3)), np.ones((9, 2, 3), int), np.ones((2, 9, 2, 3))
            ),
            "table must be floating point",
        ),
        (
            lambda: effattn.synthesizer_attention(
                np.ones((2, 9, 2, 3)), np.ones((3, 9, 2, 3)), np.ones((2, 9, 2, 3))
            ),
            r"table must be floating point of shape \(2, 9, 2, 3\), got .* \(3, 9, 2, 3\)",
        ),
        (
            lambda: effattn.factorized_synthesizer_attention(
                np.ones((2, 9, 2, 3), int), np.ones((2, 9, 2, 4)), np.ones((2, 9, 2, 3))
            ),
            "coarse must be floating point",
        ),
        (
            lambda: effattn.factorized_synthesizer_attention(
                np.ones((2, 9, 2, 3)), 1.0, np.ones((2, 9, 2, 3))
            ),
            r"fine \(B, T, N, m\) and value .*, got \(2, 9, 2, 3\), \(\) and",
        ),
        (
            lambda: effattn.factorized_synthesizer_attention(
                np.ones((2, 9, 2, 2)), np.ones((2, 9, 2, 4)), np.ones((2, 9, 2, 3))
            ),
            "at least 9 logits, one for each key, got 2 x 4",
        ),
        (
            lambda: Synthesizer(D, 2, kind="denser", max_length=9, rngs=nnx.Rngs(0)),
            "kind must be one of dense, factorized, random, factorized_random, mixture",
        ),
        (
            lambda: Synthesizer(
                D, 2, kind="random", max_length=9, hidden_features=3, rngs=nnx.Rngs(0)
            ),
            "kind='random' takes no hidden_features, got",
        ),
        (
            lambda: Synthesizer(D, 2, max_length=9, trained=False, rngs=nnx.Rngs(0)),
            "trained=False needs kind='random' or .*, got kind='dense'",
        ),
        (
            lambda: Synthesizer(D, 2, max_length=5, rngs=nnx.Rngs(0))(X),
            "x has 9 tokens, but this Synthesizer has parameters for max_length=5",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


def test_lengths_are_those_of_the_keys():
    """A query at the end of a prefix reads all of its keys."""
    factors = np.ones((1, 1, 1, 2), np.float32), np.ones((1, 1, 1, 4), np.float32)
    value = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
    given = {"query_offset": 4, "is_causal": True, "lengths": np.array([5])}
    out = effattn.factorized_synthesizer_attention(*factors, value, **given)
    np.testing.assert_allclose(out.ravel(), [2.0])
