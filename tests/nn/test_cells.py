"""LSTM and GRU agree with Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import GRU, LSTM
from tests.closeness import close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)
D = X.shape[-1]


@pytest.mark.parametrize("layer", [LSTM, GRU])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_baselines_are_those_of_flax(layer, dtype, tolerance):
    """Outputs and carry agree: in float64 by XLA, in float32 by kernels where there are any."""
    with jax.enable_x64(dtype == np.float64):
        x = jnp.asarray(np.concatenate([X, X, X], 1), dtype)
        mixer = layer(D, param_dtype=dtype, rngs=nnx.Rngs(0))
        carry, expected = nnx.RNN(mixer.cell, return_carry=True)(x)
        y, state = mixer.extend(x, mixer.init_state(2, 0))
        close(y, expected, tolerance)
        close(mixer(x), expected, tolerance)
        pairs = jax.tree.leaves(state.state), jax.tree.leaves(carry)
        jax.tree.map(lambda *pair: close(*pair, tolerance), *pairs)


@pytest.mark.parametrize("layer", [LSTM, GRU])
def test_bidirectional_baselines_are_those_of_flax(layer):
    mixer = layer(D, is_causal=False, rngs=nnx.Rngs(0))
    lengths = np.array([len(X[0]), 3])
    both = nnx.Bidirectional(
        nnx.RNN(mixer.cell), nnx.RNN(mixer.backward, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)
    )
    expected = mixer.out(both(jnp.asarray(X), seq_lengths=jnp.asarray(lengths)))
    found = mixer(X, lengths=lengths)
    for row, length in enumerate(lengths):
        close(found[row, :length], expected[row, :length])
