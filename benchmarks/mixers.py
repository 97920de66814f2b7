"""Layers for the benchmarks: the mixer of any mechanism, in one size."""

from typing import Any

from flax import nnx

from effattn import registry
from effattn.nn import RotaryEmbedding

FEATURES, HEADS, WINDOW = 256, 4, 256
OPTIONS: dict[str, dict[str, Any]] = {
    "lsh": {"num_rounds": 4, "num_buckets": 256},
    # The angles of cosFormer need a maximum length.
    "cosformer": {"max_length": 2**20},
}


def mixer_of(
    name: str,
    max_length: int,
    is_causal: bool = True,
    *,
    features: int = FEATURES,
    heads: int = HEADS,
    dtype: Any = None,
) -> Any:
    """Returns a layer with rotary positions where the mechanism has no positions of its own.

    Args:
      name: name of the mechanism; windows have 256 tokens.
      max_length: maximum number of tokens, for parameters by position.
      is_causal: whether the layer is causal.
      features: width of the layer.
      heads: number of heads.
      dtype: dtype of the computation; parameters are float32.
    """
    entry = registry.get(name)
    given = {"rotary": RotaryEmbedding(), "max_length": max_length}
    options = {**entry.options_of_model(given), **OPTIONS.get(name, {})}
    if "local_window_size" in entry.options:
        after = 0 if is_causal else (WINDOW - 1) // 2
        options["local_window_size"] = (WINDOW - 1 - after, after)
    return entry.build(
        features, heads, is_causal=is_causal, dtype=dtype, rngs=nnx.Rngs(0), **options
    )
