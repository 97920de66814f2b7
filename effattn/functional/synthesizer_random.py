"""Random Synthesizer (Tay et al. 2020): a table of logits for each pair of positions."""

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.functional.synthesizer import CAPABILITIES, entry
from effattn.naive import over_examples


def naive(mixer, x):
    """y_t = sum_s softmax_s(R_ts) v_s for each head: tokens x `(T, D)`, table R `(N, L, L)`."""
    value = jnp.einsum("td,dnh->nth", x, mixer.value.kernel[...])
    logits = mixer.table[...][:, : len(x), : len(x)]
    logits = logits.astype(jnp.promote_types(x.dtype, jnp.float32))
    if mixer.is_causal:
        logits = jnp.where(jnp.tri(len(x), dtype=bool), logits, -jnp.inf)
    y = (jax.nn.softmax(logits) @ value).astype(x.dtype)
    return jnp.einsum("nth,nhd->td", y, mixer.out.kernel[...])


registry.register(
    entry(
        name="synthesizer_random",
        function=None,
        naive=over_examples(naive),
        capabilities=CAPABILITIES,
        options={"kind": "random"},
        knows_order=True,
        complexity="O(N^2 H), O(N H) a step; a table of N^2",
        memory_exponent=2.0,
    )
)
