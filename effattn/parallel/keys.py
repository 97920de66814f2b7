"""Sequence parallelism by shared keys: low-rank, landmark, hierarchical and indexed attention."""

from collections.abc import Callable
from typing import Any

from effattn.parallel.parts import over_parts


def share_keys(function: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Returns attention to shared keys for a sequence that devices hold in parts.

    Each device compresses its own keys and values; all devices get the compressed ones, and attend
    to them from their own queries. `indexed_attention` and
    `talking_heads_attention` send the keys and values themselves:

    - `linformer_attention`: a sum of the r projected keys and values over devices. The projections
      are for the whole sequence, equal on all devices.
    - `nystrom_attention`: sums of m landmarks of queries and of keys, and a gather of what the
      landmarks read on each device; a `skip_kernel` reads values of both neighbours.
    - `block_linformer_attention`: a gather of the slots of all blocks; parts are whole blocks.
    - `hierarchical_attention`: a gather of the r summaries of all segments; parts are whole
      segments.
    - `nn.InducedSelfAttention`: a gather of what its points read on each device.
    - `indexed_attention`: a gather of the keys, values and index keys of all tokens.
    - `talking_heads_attention`: a gather of the keys and values themselves, because logits mix
      across heads.

    Call the result inside `jax.shard_map`. Its arrays of tokens are those of this device, where
    device n has the n-th part; lengths count all tokens.

    Args:
      function: one of these functions of effattn, `functools.partial` of one, or a mixer of one
        from `effattn.nn`.
      axis_name: the mesh axis that divides the tokens.

    Returns:
      A function with the arguments and results of `function`, without dropout.

    Raises:
      ValueError: on call, the function is none of these, a device has a part of a block, or dropout
        is given.
    """
    return over_parts("share_keys", function, axis_name)
