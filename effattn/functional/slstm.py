"""sLSTM (Beck et al. 2024): a recurrent network with exponential gates and a normaliser."""

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.naive import over_examples
from effattn.naive.cells import in_directions


def naive(mixer, x):
    """Tokens x `(T, D)`."""

    def normalised(cell, x):
        h = recurrence(cell, mixer.forget_gate, x).reshape(len(x), mixer.num_heads, -1)
        wide = h.astype(jnp.promote_types(h.dtype, jnp.float32))
        centred = wide - wide.mean(-1, keepdims=True)
        size = jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
        return (centred / size * mixer.norm.scale[...]).astype(x.dtype).reshape(x.shape)

    return in_directions(mixer, x, normalised)


def recurrence(cell, forget_gate, x):
    """Tokens x `(T, D)`; the exponential gates are not stabilised."""
    heads = cell.recurrent.shape[1:3]

    def step(carry, token):
        c, n, h = carry
        of_heads = jnp.einsum("nh,gnhk->gnk", h.reshape(heads), cell.recurrent[...])
        z, i, f, o = (
            (token @ cell.input.kernel[...]).reshape(4, -1)
            + cell.bias[...]
            + (of_heads.reshape(4, -1))
        )
        write, forget = jnp.exp(i), jnp.exp(f)
        if forget_gate == "sigmoid":
            forget = jax.nn.sigmoid(f)
        c, n = forget * c + write * jnp.tanh(z), forget * n + write
        h = jax.nn.sigmoid(o) * c / n
        return (c, n, h), h

    zeros = jnp.zeros(x.shape[1], jnp.promote_types(x.dtype, jnp.float32))
    return lax.scan(step, (zeros, zeros, zeros), x)[1].astype(x.dtype)


registry.register(
    registry.Mechanism(
        name="slstm",
        family="recurrent",
        paper="Beck et al. 2024, xLSTM: Extended Long Short-Term Memory",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"bidirectional", "causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.slstm:SLSTM",
        complexity="O(N D^2)",
        time_exponent=1.0,
        knows_order=True,
    )
)
