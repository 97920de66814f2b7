"""Sequence parallelism by exchange of heads (Jacobs et al. 2023, DeepSpeed-Ulysses).

Each of P devices has T / P tokens of all N heads. An all-to-all gives it all T tokens of N / P
heads; it calls the mechanism on them, and a second all-to-all gives back its own tokens of all
heads. Each device sends and receives (P - 1) / P of its parts of query, key, value and output.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from effattn.arrays import checks, mesh_axes
from effattn.cores import sequence_parts
from effattn.parallel.parts import over_parts, without_partial

_GATHERED = frozenset({"global_mask", "positions", "segment_ids"})  # (*B, T), needed whole
_OF_ROWS = frozenset(
    {"key_value_seq_lengths", "lengths", "query_offset", "query_seq_lengths", "scale"}
)
_LENGTHS = "query_seq_lengths", "key_value_seq_lengths", "lengths"
_OF_PAIRS = frozenset({"bias", "mask"})  # (..., N, T, S), whole on each device
_OF_HEADS = {"logit_bias": 0, "sink": 0}  # shared options (heads, ...), and their axes for one head


def exchange_heads(function: Callable[..., jax.Array], axis_name: str) -> Callable[..., jax.Array]:
    """Returns the function for a sequence whose tokens the devices of a mesh axis hold in parts.

    Call the result inside `jax.shard_map`. Its arrays of tokens are those of this device; lengths
    and offsets count all tokens. Positions, windows and causality are those of the whole sequence.
    The number of devices must divide the number of query heads. With fewer key heads than devices,
    key heads are repeated, so that each device has its own.

    Args:
      function: attention `(query, key, value, **options) -> output` over heads, such as those of
        effattn, or `functools.partial` of one; or a mixer of one from `effattn.nn`, such as
        `nn.SelfAttention`, whose short convolutions get the last tokens of the device before. LSH
        attention `(query_key, value)` and Synthesizers are such functions too; a device has its
        part of the rows of a table `(S, N, A)`. Options that are arrays are those that all heads
        share (`segment_ids`, `positions`, `global_mask`, lengths, `query_offset`, `scale`), `sink`,
        `logit_bias`, a `bias` or `mask` that each device has for all pairs of tokens, and the
        arrays by token or by head that the naive form of the function names. If a function of
        effattn makes random blocks, rotations or decays for each head, a head gets the same ones as
        in a call with all heads; within another function, pass them. A `score_mod` gets the index
        of a head among all heads. Refused are other arrays (such as `initial_state`), dropout, a
        `dilation` that differs by head, and second results (`return_residual`, `return_state`).
      axis_name: the mesh axis that divides the tokens.

    Returns:
      A function with the arguments of `function`, the first of them `(*B, T / P, N, H)`, that
      returns `(*B, T / P, N, Hv)`.

    Raises:
      ValueError: the function cannot be called; or, on call, the heads cannot be divided by the
        devices, or an option is refused.
    """
    if isinstance(function, nnx.Module) and _is_mixer(function):  # it calls `attend_in_parts`
        return over_parts("exchange_heads", function, axis_name)
    function, given = without_partial("exchange_heads", function)

    def run(*arrays, **options):
        inputs, options = _named(function, arrays, {**given, **options})
        heads = _Heads(function, axis_name, inputs)
        options |= heads.made(function, inputs, options)
        options = {name: heads.option(name, x) for name, x in options.items()}
        out = function(*map(heads.split, inputs.values()), **options)
        if not isinstance(out, jax.Array) or out.ndim != heads.tokens + 3:
            raise ValueError(
                "exchange_heads takes functions that return their output alone; leave out "
                "return_residual and return_state"
            )
        return heads.join(out)

    return run


def attend_in_parts(
    function: Callable[..., Any], inputs: tuple[jax.Array, ...], options: Mapping[str, Any]
) -> jax.Array:
    """The call of an attention function in a mixer, by the heads of all devices where one runs so.

    Args:
      function: attention.
      inputs: query, key and value.
      options: keyword arguments; lengths are those of this device's part.
    """
    parts = sequence_parts.current()
    if parts is not None and options.get("dropout_rng") is not None:
        raise ValueError(f"{parts.form} has no dropout; call the mixer without rngs")
    if parts is None or parts.form != "exchange_heads":
        return function(*inputs, **options)
    parts.calls += 1
    lengths = {name: parts.sum(x) for name, x in options.items() if name in _LENGTHS}
    with sequence_parts.alone():
        return exchange_heads(function, parts.axis_name)(*inputs, **{**options, **lengths})


def _is_mixer(module):
    """True if a module maps tokens, and not a query, a key and a value."""
    parameters = inspect.signature(module).parameters.values()
    of_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.kind in of_place and p.default is p.empty]) == 1


def _named(function, arrays, options):
    """The inputs by name (the arguments without a default), and the other arguments by name."""
    known = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = [p.name for p in known] + [f"array {n}" for n in range(len(known), len(arrays))]
    given = {**dict(zip(names, arrays, strict=False)), **options}
    optional = {p.name for p in known if p.default is not p.empty}
    inputs = [name for name in names if name in given and name not in optional]
    return {name: given.pop(name) for name in inputs}, given


class _Heads:
    """Exchange of tokens for heads.

    Attributes:
      axis_name: the mesh axis.
      devices: P.
      tokens: axis of the tokens in arrays `(*B, T, heads, ...)`.
      count: N, the number of query heads.
      per_token: names of options `(*B, T, heads, ...)`.
      per_head: names of options `(heads, ...)`, and their number of axes for one head.
    """

    def __init__(self, function, axis_name, inputs):
        mesh_axes.check_axis(axis_name)
        self.axis_name, self.devices = axis_name, lax.axis_size(axis_name)
        (first, of_queries), *_ = inputs.items()
        last = [*inputs.values()][-1]
        self.tokens, self.count = last.ndim - 3, of_queries.shape[-2]
        self.shape = last.shape[: self.tokens + 1]
        naive = getattr(function, "naive", None)
        self.per_token = frozenset(getattr(naive, "per_token", ()))
        self.per_head = {**_OF_HEADS, **getattr(naive, "per_head", {})}
        for name, array in inputs.items():
            heads = array.shape[-2]
            if heads % self.devices and self.devices % heads:
                raise ValueError(
                    f"{name} must have a number of heads that divides the {self.devices} devices "
                    f"of the mesh axis {axis_name!r}, or is a multiple of them, got {heads}"
                )
        if self.count % self.devices:
            raise ValueError(
                f"the {self.devices} devices of the mesh axis {axis_name!r} must divide the "
                f"{self.count} heads of {first}; choose a smaller mesh axis or more heads"
            )

    def split(self, x: jax.Array) -> jax.Array:
        """All tokens of the heads of this device, from its tokens `(*B, T, heads, H)`."""
        return self._exchanged(x, x.ndim - 3)

    def _exchanged(self, x, tokens):
        if x.shape[tokens + 1] < self.devices:
            x = jnp.repeat(x, self.devices // x.shape[tokens + 1], tokens + 1)
        return lax.all_to_all(x, self.axis_name, tokens + 1, tokens, tiled=True)

    def join(self, x: jax.Array) -> jax.Array:
        """The tokens of this device of all heads."""
        return lax.all_to_all(x, self.axis_name, self.tokens, self.tokens + 1, tiled=True)

    def made(self, function: Any, inputs: Any, options: Any) -> dict[str, Any]:
        """The options by head that the function would make in a call with all heads."""
        make = getattr(getattr(function, "naive", None), "made_by_head", None)
        if make is None:
            return {}
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        return dict(make(**defaults | {n: self._whole(x) for n, x in inputs.items()} | options))

    def _whole(self, x):
        """The shape of an input of all tokens."""
        shape = (*x.shape[:-3], self.devices * x.shape[-3], *x.shape[-2:])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def option(self, name: str, x: Any) -> Any:
        """An option of the call on this device's heads."""
        if name == "score_mod" and x is not None:
            return self._with_index(x)
        if name == "dilation" and not checks.is_integer(x):
            raise ValueError(
                f"exchange_heads needs one dilation for all heads, an int, got {x!r}; call it once "
                "for the heads of each dilation"
            )
        is_rate_of_zero = isinstance(x, int | float) and x == 0
        if name in ("dropout_rate", "dropout_rng") and x is not None and not is_rate_of_zero:
            raise ValueError(f"exchange_heads has no dropout, got {name}; leave it out")
        leaves = jax.tree.leaves(x)
        if not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves) or name in _OF_ROWS:
            return x
        if name in _GATHERED:
            return jax.tree.map(self._gather, x)
        if name in self.per_token and jnp.ndim(x) > self.tokens + 1:
            if x.shape[: self.tokens + 1] != self.shape:
                raise ValueError(
                    f"{name} must have shape {(*self.shape, 'heads', '...')} on each device, got "
                    f"{x.shape}"
                )
            return self._exchanged(jnp.asarray(x), self.tokens)
        if name in _OF_PAIRS:
            x = jnp.asarray(x)
            return x if x.ndim < 3 or x.shape[-3] == 1 else self._own(x, x.ndim - 3)
        if name in self.per_head:
            # Arrays of a tuple stand for one array with an axis more.
            rank = self.per_head[name] - isinstance(x, tuple | list)
            return jax.tree.map(lambda leaf: self._own(leaf) if leaf.ndim > rank else leaf, x)
        known = _GATHERED | _OF_ROWS | _OF_PAIRS | self.per_token | self.per_head.keys()
        raise ValueError(
            f"exchange_heads cannot divide the option {name!r}, an array, among devices; for this "
            f"function it takes arrays for {', '.join(sorted(known))}"
        )

    def _gather(self, x):
        x = jnp.asarray(x)
        return lax.all_gather(x, self.axis_name, axis=x.ndim - 1, tiled=True)

    def _own(self, x, axis=0):
        """The entries of this device's heads, along an axis of heads."""
        x = jnp.asarray(x)
        if x.shape[axis] < self.devices:
            x = jnp.repeat(x, self.devices // x.shape[axis], axis)
        size = x.shape[axis] // self.devices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis_name) * size, size, axis)

    def _with_index(self, score_mod):
        first = lax.axis_index(self.axis_name) * (self.count // self.devices)
        return lambda logit, b, h, i, j: score_mod(logit, b, first + h, i, j)
