import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.analysis import cost
from effattn.nn import AFTConv, AFTFull, AFTLocal
from tests.nn.build import filled, floats

BIASED = {
    "full": lambda length: AFTFull(8, max_length=length, rngs=nnx.Rngs(0)),
    "local": lambda length: AFTLocal(8, max_length=length, local_window_size=3, rngs=nnx.Rngs(0)),
    "conv": lambda length: AFTConv(8, 2, local_window_size=3, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("kind", BIASED)
def test_a_prompt_costs_what_a_sequence_does(kind):
    mixer = nnx.eval_shape(lambda: BIASED[kind](1024))
    x = jax.ShapeDtypeStruct((1, 1024, 8), jnp.float32)
    state = jax.eval_shape(lambda mixer: mixer.init_state(1, 1024), mixer)
    whole = cost.operations(jax.make_jaxpr(lambda mixer, x: mixer(x))(mixer, x))
    read = jax.make_jaxpr(lambda mixer, x, state: mixer.extend(x, state))(mixer, x, state)
    assert cost.operations(read) < 1.1 * whole


@pytest.mark.parametrize("kind", BIASED)
def test_prompts_and_steps_are_of_one_sequence(kind):
    """Prompts have unequal lengths; tokens follow one by one, or several at a time."""
    mixer, x, lengths = filled(lambda: BIASED[kind](40)), floats(2, 40, 8), np.array([30, 22])
    tokens = jnp.where(np.arange(30)[:, None] < lengths[:, None, None], x[:, :30], jnp.nan)
    out, state = jax.jit(mixer.extend)(tokens, mixer.init_state(2, 40), lengths=lengths)
    whole, step = jax.jit(mixer)(x), jax.jit(mixer.extend)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(out[row, :length], whole[row, :length], rtol=1e-5, atol=1e-6)
    at = lengths
    for time in (1, 1, 6):
        places = at[:, None] + np.arange(time)
        out, state = step(np.take_along_axis(x, places[..., None], 1), state)
        expected = np.take_along_axis(whole, places[..., None], 1)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        at = at + time


@pytest.mark.parametrize("kind", ["full", "local"])
def test_a_state_has_room_for_as_many_tokens_as_there_are_biases(kind):
    mixer = filled(lambda: BIASED[kind](8))
    with pytest.raises(
        ValueError, match="max_length asks for 9 tokens, but this AFT.* has parameters for"
    ):
        mixer.init_state(1, 9)
