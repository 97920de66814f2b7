"""LSTM and GRU agree with Flax; gradients of cells in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import GRU, LSTM, SLSTM
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


@pytest.mark.parametrize("layer", [LSTM, GRU, SLSTM])
def test_gradients_of_16_bit_parameters_are_summed_over_tokens_in_float32(layer):
    """A sum of 1024 terms in bfloat16 would not grow beyond 256 times a term.

    The gradient of the matrix of the tokens is one product, and XLA's.
    """
    mixer = layer(D, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    weights = np.arange(1, D + 1, dtype=np.float32)

    @jax.jit
    def gradients(mixer, x):
        return jax.grad(lambda mixer: (mixer(x) * weights).sum())(mixer)

    x = jnp.ones((1, 1024, D))
    wide = gradients(jax.tree.map(lambda p: p.astype(np.float32), mixer), x)
    narrow = gradients(mixer, x.astype(jnp.bfloat16))
    shared = "dense_h" if hasattr(mixer.cell, "dense_h") else "recurrent"
    of_wide, of_narrow = (jax.tree.leaves(getattr(m.cell, shared)) for m in (wide, narrow))
    for expected, found in zip(of_wide, of_narrow, strict=True):
        atol = 0.02 * abs(expected).max()
        np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=atol)
