"""Sequence parallelism by exchange of heads (Jacobs et al. 2023, DeepSpeed-Ulysses).

Each of P devices has T / P tokens of all heads. An all-to-all gives it all T tokens of N / P heads;
it calls the mechanism on them, and a second all-to-all gives back its own tokens of all heads. Each
device sends and receives (P - 1) / P of its parts of query, key, value and output.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Options by what their arrays are made of.
_GATHERED = frozenset({"segment_ids", "positions"})  # (*B, T), needed for all tokens
# (*B, T, heads, ...)
_OF_TOKENS = frozenset({"beta", "gate", "learning_rate", "log_decay", "removal_key", "step_size"})
_OF_HEADS = frozenset({"bonus", "log_decay", "logit_bias", "rate", "sink", "skip"})  # (heads, ...)
_OF_ROWS = frozenset({"query_seq_lengths", "key_value_seq_lengths", "query_offset", "scale"})


def exchange_heads(function: Callable[..., jax.Array], axis_name: str) -> Callable[..., jax.Array]:
    """Returns the function for a sequence whose tokens the devices of a mesh axis hold in parts.

    Call the result inside `jax.shard_map`. Its arrays of tokens are those of this device; lengths
    and offsets count all tokens. Positions, windows and causality are those of the whole sequence.
    With fewer key heads than devices, key heads are repeated, so that each device has its own.

    Args:
      function: attention `(query, key, value, **options) -> output` over heads, such as those of
        effattn, or `functools.partial` of one for options without arrays. Other options are: what
        all heads share (`segment_ids`, `positions`, lengths, `query_offset`, `scale`); what each
        token has for each head (`beta`, `gate`, `learning_rate`, `log_decay`, `removal_key`,
        `step_size`); what each head has (`bonus`, `log_decay`, `logit_bias`, `random_blocks`,
        `rate`, `sink`, `skip`); and a `score_mod`, which gets the index of a head among all heads.
      axis_name: the mesh axis that divides the tokens.

    Returns:
      A function `(query, key, value, **options) -> output`, with query `(*B, T / P, N, H)`.

    Raises:
      ValueError: on call, the heads cannot be divided by the devices, or an option cannot be
        exchanged.
    """

    def run(query, key, value, **options):
        devices = lax.axis_size(axis_name)
        _check_random_blocks(function, options)
        heads = _Heads(axis_name, devices, query, key, value)
        given = {name: heads.option(name, x) for name, x in options.items()}
        out = function(heads.split(query), heads.split(key), heads.split(value), **given)
        if not isinstance(out, jax.Array) or out.ndim != query.ndim:
            raise ValueError(
                "exchange_heads takes functions that return their output alone; leave out "
                "return_residual and return_state"
            )
        return heads.join(out)

    return run


def _check_random_blocks(function, options):
    """Raises `ValueError` if the function would draw blocks by the index of a head on a device."""
    parameters = inspect.signature(function).parameters
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", "")
    if name == "retention" and options.get("log_decay", parameters["log_decay"].default) is None:
        raise ValueError(
            "exchange_heads needs log_decay, because the decays of retention differ by head"
        )
    if "random_blocks" not in parameters or options.get("random_blocks") is not None:
        return
    count = options.get("num_random_blocks", parameters["num_random_blocks"].default)
    if parameters["random_blocks"].default is None and count:
        raise ValueError(
            "exchange_heads needs random_blocks, because the blocks that this function draws "
            "differ by head; pass them, or num_random_blocks=0"
        )


class _Heads:
    """Exchange of tokens for heads.

    Attributes:
      axis_name: the mesh axis.
      devices: P.
      tokens: axis of the tokens in arrays `(*B, T, heads, ...)`.
      count: N, the number of query heads.
    """

    def __init__(self, axis_name, devices, query, key, value):
        self.axis_name, self.devices = axis_name, devices
        self.tokens, self.count = query.ndim - 3, query.shape[-2]
        for name, array in (("query", query), ("key", key), ("value", value)):
            heads = array.shape[-2]
            if heads % devices and devices % heads:
                raise ValueError(
                    f"{name} must have a number of heads that divides the {devices} devices of "
                    f"the mesh axis {axis_name!r}, or is a multiple of them, got {heads}"
                )
        if self.count % devices:
            raise ValueError(
                f"the {devices} devices of the mesh axis {axis_name!r} must divide the "
                f"{self.count} query heads; choose a smaller mesh axis or more heads"
            )

    def split(self, x: jax.Array) -> jax.Array:
        """All tokens of the heads of this device, from its tokens of all heads."""
        axis = self.tokens + 1
        if x.shape[axis] < self.devices:
            x = jnp.repeat(x, self.devices // x.shape[axis], axis)
        return lax.all_to_all(x, self.axis_name, axis, self.tokens, tiled=True)

    def join(self, x: jax.Array) -> jax.Array:
        """The tokens of this device of all heads."""
        return lax.all_to_all(x, self.axis_name, self.tokens, self.tokens + 1, tiled=True)

    def option(self, name: str, x: Any) -> Any:
        """An option of the call on this device's heads."""
        if name == "score_mod" and x is not None:
            return self._with_index(x)
        is_rate_of_zero = isinstance(x, int | float) and x == 0
        if name in ("dropout_rate", "dropout_rng") and x is not None and not is_rate_of_zero:
            raise ValueError(f"exchange_heads has no dropout, got {name}; leave it out")
        arrays = [isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(x)]
        if not any(arrays) or name in _OF_ROWS:
            return x
        x = jax.tree.map(jnp.asarray, x)
        if name in _GATHERED:
            return jax.tree.map(self._gather, x)
        if name == "random_blocks":  # (n, r) for all heads, or (K, n, r)
            return x if x.ndim == 2 else self._own(x)
        if name in _OF_TOKENS and x.ndim > self.tokens + 1:
            return self.split(x)
        if name in _OF_HEADS:
            return self._own(x)
        raise ValueError(
            f"exchange_heads cannot divide the option {name!r}, an array, among devices; it takes "
            f"arrays for {', '.join(sorted(_GATHERED | _OF_TOKENS | _OF_HEADS | _OF_ROWS))}"
        )

    def _gather(self, x):
        return lax.all_gather(x, self.axis_name, axis=x.ndim - 1, tiled=True)

    def _own(self, x):
        """The entries of this device's heads of `(heads, ...)`."""
        if len(x) < self.devices:
            x = jnp.repeat(x, self.devices // len(x), 0)
        size = len(x) // self.devices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis_name) * size, size)

    def _with_index(self, score_mod):
        first = lax.axis_index(self.axis_name) * (self.count // self.devices)
        return lambda logit, b, h, i, j: score_mod(logit, b, first + h, i, j)
