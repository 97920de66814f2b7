"""Mega (Ma et al. 2022): gated attention in chunks, on a moving average of the tokens."""

import math

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.naive import masked_softmax, over_examples


def naive(mixer, x):
    """Over all pairs: tokens x `(T, D)`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    place = jnp.arange(len(x))
    distance = place - place[:, None]  # of the key s from the query t, s - t

    def through(layer, x):
        return x @ layer.kernel[...] + layer.bias[...]

    def average(n, steps):
        """The moving average n, of tokens `steps (T, T)` before each token."""
        alpha, delta = (jax.nn.sigmoid(a[n].astype(wide)) for a in (mixer.alpha, mixer.delta))
        decays = (1 - alpha * delta) ** jnp.maximum(steps, 0)[..., None, None]  # (T, T, D, h)
        taps = jnp.where((steps >= 0)[..., None], (decays * alpha * weights[n]).sum(-1), 0)
        return (taps * x).sum(1)

    weights = mixer.beta[...].astype(wide) * mixer.eta[...] / mixer.ema_dim**0.5
    averaged = average(0, -distance) + mixer.omega[...] * x
    if not mixer.is_causal:
        averaged = averaged + average(1, distance)
    averaged = jax.nn.silu(averaged).astype(x.dtype)

    shared = jax.nn.silu(through(mixer.shared, averaged))
    query, key = (
        (scale * shared + shift).astype(wide)
        for scale, shift in zip(mixer.kappa[...], mixer.mu[...], strict=True)
    )
    value = jax.nn.silu(through(mixer.value, x))
    seen = place // mixer.chunk_length == (place // mixer.chunk_length)[:, None]
    seen = seen & (distance <= 0) if mixer.is_causal else seen
    products, bias = query @ key.T, _bias(mixer, distance, wide)
    if mixer.attention_function == "softmax":
        weights = masked_softmax(products / query.shape[1] ** 0.5 + bias, seen)
    else:
        logits = products / seen.sum(1, keepdims=True) + bias
        laplace = (1 + jax.scipy.special.erf((logits - 0.5**0.5) * (2 * math.pi) ** 0.5)) / 2
        weights = jnp.where(seen, laplace, 0)
    attended = (weights @ value).astype(x.dtype)

    reset = jax.nn.silu(through(mixer.reset, averaged))
    update = jax.nn.sigmoid(through(mixer.update, averaged))
    candidate = through(mixer.candidate, averaged) + (reset * attended) @ mixer.out.kernel[...]
    return update * jax.nn.silu(candidate) + (1 - update) * x


def _bias(mixer, distance, dtype):
    """Biases `(T, T)` of all distances; those beyond a chunk have no meaning."""
    if mixer.relative_bias == "simple":
        return mixer.position_bias[...].astype(dtype)[distance + mixer.chunk_length - 1]
    one, other = (x.astype(dtype).reshape(2, -1) for x in mixer.position_bias[...])
    frequency = 10000.0 ** (-jnp.arange(one.shape[1]) / one.shape[1])
    place = jnp.arange(len(distance), dtype=dtype)

    def turned(pair):
        angle = place[:, None] * frequency
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin], 1)

    return turned(one) @ turned(other).T


registry.register(
    registry.Mechanism(
        name="mega",
        family="hybrid",
        paper="Ma et al. 2022, Mega: Moving Average Equipped Gated Attention",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "segments", "decode"}),
        options={"chunk_length": 128},
        builder="effattn.nn.mega:Mega",
        complexity="O(N D (c + h + log N))",
        time_exponent=1.0,
        causality="rounding",
        knows_order=True,
    )
)
