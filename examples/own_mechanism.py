"""
A mechanism of your own
=======================

Attention whose weights fall with the distance of two tokens, as a function of your own package. The
laws of effattn test it, and models take it by its name.
"""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx

import effattn
from effattn import naive, nn, options, registry, testing

# %%
# The naive form is the formula for one head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`. `pairs`
# has the positions of queries and keys, and its softmax runs over the pairs that may attend. The
# naive form is slow and easy to check, so it is the reference.


def one_head(query, key, value, pairs, *, scale, rate):
    distance = jnp.abs(pairs.i[:, None] - pairs.j).astype(query.dtype)
    weights, _ = pairs.softmax(scale * query @ key.T - rate * jnp.log1p(distance))
    return weights @ value


# %%
# `score_mod` changes logits tile by tile, so the fast form needs no table of all pairs. `Options`
# are the shared options that the function takes, and passes on.


class Options(options.Direction, options.Offset, options.Packing, options.Padding, total=False):
    pass


@naive.with_naive(naive.over_pairs(one_head))
@options.declared
def kerple_attention(query, key, value, *, rate=1.0, **given: Unpack[Options]):
    def score_mod(logit, b, h, i, j):
        return logit - rate * jnp.log1p(jnp.abs(i - j).astype(logit.dtype))

    return effattn.dot_product_attention(query, key, value, score_mod=score_mod, **given)


registry.register(
    registry.Mechanism(
        name="kerple",
        family="exact",
        paper="Chi et al. 2022, KERPLE: Kernelized Relative Positional Embedding",
        function=kerple_attention,
        capabilities=frozenset({"cross"}),
        decoder="effattn.decode.contiguous:ContiguousDecoder",
        knows_order=True,
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)

# %%
# The laws: the function equals its naive form with all gradients, is causal, ignores padding, packs
# documents, decodes as it trains, and stays finite. `check` raises an error that names the law that
# is broken. Without `astype` above, for example, a logarithm would be float32 in a call in float64.

testing.check("kerple")
print("all laws hold")

# %%
# The name works wherever effattn takes a mechanism, here with an option.

config = nn.TransformerConfig(
    vocab_size=256, num_layers=2, features=32, num_heads=2, mixer={"name": "kerple", "rate": 0.5}
)
model = nn.TransformerLM(config, rngs=nnx.Rngs(0))
print("logits:", model(jnp.zeros((1, 100), int)).shape)
print("new tokens:", nn.generate(model, jnp.ones((1, 5), int), max_new_tokens=5, temperature=0))
