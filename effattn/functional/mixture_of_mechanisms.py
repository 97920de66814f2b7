"""Mixture of mechanisms (Jacobs et al. 1991): a gate for each token over several mixers."""

import jax
import jax.numpy as jnp
from jax import lax

from effattn import registry
from effattn.naive import over_examples


def naive(mixer, x):
    """Tokens x `(T, D)`; each of `mixer.mixers` maps `(1, T, D)` to `(1, T, D)`.

    The inner mixers run as they were made: in their naive forms by `implementation="naive"`.
    """
    mechanisms = len(mixer.mixers)
    logits = x @ mixer.choose.kernel[...] + mixer.choose.bias[...]
    gates = jax.nn.softmax(logits.astype(jnp.promote_types(x.dtype, jnp.float32)))
    if mixer.gate == "top1":
        choice = gates.argmax(-1)
        if mixer.capacity is not None:
            choice = _placed(choice, mixer.capacity, mechanisms)
        largest = jax.nn.one_hot(choice, mechanisms, dtype=gates.dtype)
        gates = largest + (gates - lax.stop_gradient(gates))  # with the gradient of the softmax
    outputs = jnp.stack([mix(x[None])[0] for mix in mixer.mixers], 1)  # (T, M, D)
    return (gates.astype(x.dtype)[..., None] * outputs).sum(1)


def _placed(choice, capacity, mechanisms):
    """The first mechanism for tokens that find no place in the mechanism of their choice."""

    def step(taken, token):
        wish, budget = token
        full = (wish > 0) & (taken[wish] >= budget)
        wish = jnp.where(full, 0, wish)
        return taken.at[wish].add(1), wish

    tokens = jnp.arange(1, len(choice) + 1, dtype=jnp.float32)
    budgets = jnp.floor(tokens * jnp.float32(capacity)).astype(jnp.int32)
    return lax.scan(step, jnp.zeros(mechanisms, jnp.int32), (choice, budgets))[1]


registry.register(
    registry.Mechanism(
        name="mixture_of_mechanisms",
        family="hybrid",
        paper="Jacobs et al. 1991, Adaptive Mixtures of Local Experts",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "segments", "decode"}),
        options={"mechanisms": ("sliding_window", "softmax")},
        builder="effattn.nn.mixture_of_mechanisms:MixtureOfMechanisms",
        complexity="the sum of its mechanisms'",
        time_exponent=2.0,
    )
)
