"""Loaders of attention layers of Reformer: with hashing, and local ones."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

from effattn.arrays import checks
from effattn.nn.lsh import LSHSelfAttention
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.layer import Layer, array_of, check_heads, filled, loader
from effattn.nn.self_attention import SelfAttention


@loader
def reformer_lsh_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    num_buckets: int | tuple[int, ...],
    num_rounds: int = 1,
    chunk_length: int = 64,
    is_causal: bool = True,
    rotations: Any = None,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> LSHSelfAttention:
    """Loads a pretrained Reformer layer with hashing (`ReformerAttention` of transformers).

        mixer = reformer_lsh_from_transformers(
            model.state_dict(), prefix="reformer.encoder.layers.1.attention.", num_heads=2,
            num_buckets=(64, 128))

    The mixer returns the update that the layer adds to its input; the norm before it is not loaded.
    With one round, the same `rotations` and `is_causal=False`, it agrees with a layer of
    transformers that looks at one chunk before. With more rounds, the mixer divides each pair by
    how often it is met, as in the paper, and transformers does not. Causal layers of transformers
    mask chunks whose borders depend on later tokens; a causal mixer reads the last tokens of the
    bucket instead (see `effattn.lsh_attention`), so outputs differ.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      num_buckets: `num_buckets` of the transformers config, an int or a tuple of factors.
      num_rounds: `num_hashes` of the transformers config.
      chunk_length: `lsh_attn_chunk_length` of the transformers config.
      is_causal: `is_decoder` of the transformers config.
      rotations: `(N, num_rounds, H, columns)`, replaces the random rotations, which transformers
        draws anew in each call.
      prefix: the part of the names before `self_attention.query_key.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      An `LSHSelfAttention`.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, an array has another shape, or
        heads that do not divide the features.
    """
    read = Layer(parameters, prefix, **dtypes)
    features, inner = _checked(read, ("query_key", "value"), num_heads)
    mixer = read.build(
        LSHSelfAttention,
        features,
        num_heads,
        head_dim=inner // num_heads,
        num_rounds=num_rounds,
        # A single int would be factorised here, and is not in transformers.
        num_buckets=(num_buckets,) if checks.is_integer(num_buckets) else num_buckets,
        chunk_length=chunk_length,
        is_causal=is_causal,
    )
    arrays = [
        (mixer.query_key.kernel, read.kernel("self_attention.query_key.weight", features, inner)),
        (mixer.value.kernel, read.kernel("self_attention.value.weight", features, inner)),
        (mixer.out.kernel, read.kernel("output.dense.weight", inner, features)),
    ]
    if rotations is not None:
        shape = mixer.rotations[...].shape
        arrays.append((mixer.rotations, array_of({"rotations": rotations}, "rotations", shape)))
    return filled(mixer, arrays)


@loader
def reformer_local_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    chunk_length: int = 64,
    chunks_before: int = 1,
    chunks_after: int = 0,
    is_causal: bool = True,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> SelfAttention:
    """Loads a pretrained local Reformer layer (`ReformerAttention` of transformers).

    A token attends to its chunk and to the chunks before and after it, by block-sparse attention.
    The mixer returns the update that the layer adds to its input; the norm before it is not loaded.
    In bidirectional layers of transformers, the first chunk also reads the last one, as if the
    chunks were a ring; here it does not.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      chunk_length: `local_attn_chunk_length` of the transformers config.
      chunks_before: `local_num_chunks_before` of the transformers config.
      chunks_after: `local_num_chunks_after` of the transformers config.
      is_causal: `is_decoder` of the transformers config.
      prefix: the part of the names before `self_attention.query.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A `SelfAttention` with the mechanism "block_sparse".

    Raises:
      ValueError: as `reformer_lsh_from_transformers`.
    """
    checks.at_least("chunk_length", chunk_length, 1, "tokens")
    for name, chunks in (("chunks_before", chunks_before), ("chunks_after", chunks_after)):
        checks.at_least(name, chunks, 0, "chunks")
    layers = "query", "key", "value"
    read = Layer(parameters, prefix, **dtypes)
    features, inner = _checked(read, layers, num_heads)
    mixer = read.build(
        SelfAttention,
        features,
        num_heads,
        "block_sparse",
        head_dim=inner // num_heads,
        block_size=chunk_length,
        block_mask=_NearChunks(chunks_before, chunks_after),
        is_causal=is_causal,
    )
    arrays = [(mixer.out.kernel, read.kernel("output.dense.weight", inner, features))]
    for name in layers:
        kernel = read.kernel(f"self_attention.{name}.weight", features, inner)
        arrays.append((getattr(mixer, name).kernel, kernel))
    return filled(mixer, arrays)


@dataclasses.dataclass(frozen=True)
class _NearChunks:
    """Block mask of a chunk, the chunks before it and those after it."""

    before: int
    after: int

    def __call__(self, m: Any, n: Any) -> Any:
        return (m - n <= self.before) & (n - m <= self.after)


def _checked(read: Layer, layers: tuple[str, ...], num_heads: int) -> tuple[int, int]:
    """Checks the names; returns the features of a token and of all heads together."""
    names = [f"self_attention.{name}.weight" for name in layers]
    norm = "layer_norm.weight", "layer_norm.bias"
    read.expect([*names, "output.dense.weight"], ignored=norm)
    shapes = dict.fromkeys(names, "inner features")
    size = read.sizes({**shapes, "output.dense.weight": "features inner"})
    check_heads(num_heads, size["inner"])
    return size["features"], size["inner"]
