"""The layers that are timed: any mechanism's mixer, of one size."""

from typing import Any

from flax import nnx

from effattn import registry
from effattn.nn import RotaryEmbedding

FEATURES, HEADS, WINDOW = 256, 4, 256
OPTIONS: dict[str, dict[str, Any]] = {
    "lsh": {"num_rounds": 4, "num_buckets": 256},
    # Their features are of positions up to it.
    "cosformer": {"max_length": 2**20},
}


def mixer_of(name: str, max_length: int, is_causal: bool = True) -> Any:
    """The layer of 256 features, of 4 heads where it has heads, rotary where it knows no order.

    Args:
      name: of the mechanism; those with windows see 256 tokens.
      max_length: the most tokens, for parameters by position.
      is_causal: whether a token sees those before it alone.
    """
    entry = registry.get(name)
    given = {"rotary": RotaryEmbedding(), "max_length": max_length}
    options = {**entry.options_of_model(given), **OPTIONS.get(name, {})}
    if "local_window_size" in entry.options:
        after = 0 if is_causal else (WINDOW - 1) // 2
        options["local_window_size"] = (WINDOW - 1 - after, after)
    return entry.build(FEATURES, HEADS, is_causal=is_causal, rngs=nnx.Rngs(0), **options)
