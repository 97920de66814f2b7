"""What recurrent mechanisms share: a state that carries gradients, and what all of them refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import gated_linear_attention, retention, state_space_duality
from tests.laws.battery import QUICK

BATCH, LENGTH, HEADS, SIZE, VALUE_SIZE = 2, 9, 2, 4, 3


def draw():
    rng = np.random.default_rng(0)
    tokens = BATCH, LENGTH, HEADS
    arrays = {
        "query": rng.normal(size=(*tokens, SIZE)),
        "key": rng.normal(size=(*tokens, SIZE)),
        "value": rng.normal(size=(*tokens, VALUE_SIZE)),
        "of_heads": -rng.uniform(0.1, 1, size=HEADS),
        "of_tokens": -rng.uniform(0.1, 1, size=tokens),
        "of_features": -rng.uniform(0.1, 1, size=(*tokens, SIZE)),
        "initial_state": rng.normal(size=(BATCH, HEADS, SIZE, VALUE_SIZE)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


# The function, and where its other arguments come from: those of tokens, and those of heads.
MECHANISMS = {
    "retention": (retention, {}, {"log_decay": "of_heads"}),
    "token_decay": (gated_linear_attention, {"log_decay": "of_tokens"}, {}),
    "feature_decay": (gated_linear_attention, {"log_decay": "of_features"}, {}),
    "mamba2": (state_space_duality, {"step_size": "of_tokens"}, {"rate": "of_heads"}),
}


def given(mechanism):
    """The function, the arrays of tokens and the other arrays, by name."""
    function, of_tokens, others = MECHANISMS[mechanism]
    arrays = draw()
    if mechanism == "mamba2":
        arrays["of_tokens"] *= -1
    return (
        function,
        {name: arrays[name] for name in ("query", "key", "value")}
        | {name: arrays[source] for name, source in of_tokens.items()},
        {name: arrays[source] for name, source in others.items()}
        | {"initial_state": arrays["initial_state"]},
    )


def runs(mechanism, cuts):
    """Results and gradients of all arrays, of the sequence in the pieces between cuts."""
    function, tokens, others = given(mechanism)
    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=tokens["value"].shape).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(tokens, others):
        state, outs = others["initial_state"], []
        for start, stop in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            piece = {name: x[:, start:stop] for name, x in tokens.items()}
            out, state = function(
                **piece, **{**others, "initial_state": state}, return_state=True, chunk_size=4
            )
            outs.append(out)
        out = jnp.concatenate(outs, 1)
        return jnp.sum(out * cotangent) + jnp.sum(state**2), (out, state)

    (_, results), gradients = loss(tokens, others)
    return results, gradients


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_state_continues_a_sequence_and_carries_gradients(mechanism):
    whole, pieces = runs(mechanism, ()), runs(mechanism, (5,))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), pieces, whole)
    for gradient in jax.tree.leaves(whole[1]):
        assert np.all(gradient != 0)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    "options, message",
    [
        ({"query": np.ones((2, 9, 2, 3))}, "query and key must have the same head size, got 3"),
        ({"key": np.ones((9, 2))}, r"key must have shape \(\*batch, length, heads, head size\)"),
        ({"query": np.ones((2, 8, 2, 4))}, "as many queries as keys, got 8 and 9; to continue"),
        ({"value": np.ones((2, 8, 2, 3))}, "value must have the length and heads of key"),
        ({"value": np.ones((2, 9, 2, 3), int)}, "value must be floating point, got dtype int"),
        ({"initial_state": np.ones((2, 2, 3, 4))}, r"initial_state must .*\(2, 2, 4, 3\)"),
        ({"segment_ids": (np.ones((2, 9), int),) * 2}, "segment_ids must be one array .* a pair"),
        ({"segment_ids": np.ones((2, 8), int)}, r"segment_ids .* integers of shape \(2, 9\)"),
        ({"query_seq_lengths": np.ones(3, int)}, r"query_seq_lengths must be .* shape \(2,\)"),
        ({"chunk_size": 0}, "chunk_size must be None or an int, 1 or more tokens, got 0"),
        ({"chunk_size": 2.0}, "chunk_size must be None or an int, 1 or more tokens, got 2.0"),
        ({"implementation": "fast"}, "unknown implementation 'fast'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(mechanism, options, message):
    function, tokens, others = given(mechanism)
    with pytest.raises(ValueError, match=message):
        function(**{**tokens, **others, **options})


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_other_implementations_say_who_takes_it(mechanism):
    function, tokens, others = given(mechanism)
    with pytest.raises(NotImplementedError, match=f"{function.__name__} has no 'pallas'"):
        function(**tokens, **others, implementation="pallas")
