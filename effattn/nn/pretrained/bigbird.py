"""Loader of attention layers of BigBird."""

from collections.abc import Mapping
from typing import Any, Unpack

from effattn.arrays import checks
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.attention import PROJECTIONS, checked, with_layers
from effattn.nn.pretrained.layer import Layer, loader
from effattn.nn.self_attention import SelfAttention
from effattn.patterns.named import bigbird_parts


@loader
def bigbird_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    attention_type: str = "block_sparse",
    block_size: int = 64,
    num_random_blocks: int = 3,
    seed: int = 0,
    random_blocks: Any = None,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> SelfAttention:
    """Loads a pretrained BigBird attention layer into an equivalent module.

        model = transformers.AutoModel.from_pretrained("google/bigbird-roberta-base")
        mixer = bigbird_from_transformers(
            model.state_dict(), prefix="encoder.layer.0.attention.", num_heads=12)

    The mixer returns the update that `BigBirdAttention` adds to its input, as in
    `longformer_from_transformers`. The first and last blocks are global, and the window has three
    blocks.

    In training, transformers draws random blocks with NumPy for each length. The module agrees with
    transformers if it gets the same blocks as `random_blocks`; otherwise blocks are drawn from
    `seed`. The module differs from transformers in three cases:

    - In evaluation, transformers draws no random blocks, and instead counts the keys of the first
      block `num_random_blocks` more times. Here each key always counts once.
    - At 1024 tokens, the random blocks of transformers may contain the last block, which is
      already global and then counts twice.
    - Up to (5 + 2 `num_random_blocks`) `block_size` tokens, models of transformers use full
      attention for any config. Here only `attention_type="original_full"` does.

    Args:
      parameters: mapping of names to arrays, as in `longformer_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      attention_type: "block_sparse", or "original_full" for exact attention.
      block_size: `block_size` of the transformers config.
      num_random_blocks: `num_random_blocks` of the transformers config.
      seed: seed of the random blocks.
      random_blocks: int `(N, n, r)` for n blocks, replaces the draw, as in
        `effattn.bigbird_attention`. The arrays of transformers lack the first and last row.
      prefix: as in `longformer_from_transformers`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A bidirectional `SelfAttention` with biases.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    options: dict[str, Any] = {
        "original_full": {"attention": "softmax"},
        "block_sparse": {
            "attention": "bigbird",
            "block_size": block_size,
            "num_window_blocks": 3,
            "num_global_blocks": (1, 1),
            "num_random_blocks": num_random_blocks,
            "seed": seed,
        },
    }
    chosen = options[checks.one_of("attention_type", attention_type, options)]
    if random_blocks is not None:
        if attention_type == "original_full":
            raise ValueError(
                "random_blocks needs attention_type='block_sparse', got 'original_full'; leave out "
                "random_blocks or attention_type"
            )
        chosen["random_blocks"] = random_blocks
    read = Layer(parameters, prefix, **dtypes)
    layers, features = checked(read, PROJECTIONS, num_heads)
    bigbird_parts(block_size, 3, (1, 1), num_random_blocks, seed, False, num_heads)  # checks only
    mixer = read.build(SelfAttention, features, num_heads, is_causal=False, use_bias=True, **chosen)
    return with_layers(read, mixer, layers, features)
