"""Reversible residual layers, which do not store activations for the backward pass."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.linear_map import with_derivatives
from effattn.nn.dropout import dropout_key
from effattn.nn.module import Module
from effattn.nn.tokens import valid_tokens, zero_padding


class ReversibleStack(Module):
    """Stack of reversible residual layers; the backward pass recomputes inputs from outputs.

    Gomez et al. 2017, "The Reversible Residual Network"; Kitaev et al. 2020, "Reformer". A layer
    acts on two streams:

        y1 = x1 + F(x2),    y2 = x2 + G(y1),

    for example with a mixer F and a feed-forward layer G. The inverse is

        x2 = y2 - G(y1),    x1 = y1 - F(x2).

    Gradients equal those of the layers without inversion, up to rounding of the streams, which are
    at least float32. The backward pass computes each layer once more, as `jax.checkpoint` does.
    Activations take the memory of one layer for any number of layers.

    Args:
      *layers: pairs (F, G) of modules from `(B, T, D)` to `(B, T, D)`. A module gets those of the
        arguments `lengths`, `segment_ids` and `rngs` that its signature names. Modules must not
        write Variables. Modules are not copied: a module given twice shares its parameters.

    Raises:
      ValueError: no layers, or a layer that is not a pair.
    """

    def __init__(self, *layers: Sequence[Any]):
        if not layers or any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in layers):
            raise ValueError(
                "layers must be one or more pairs (F, G) of modules, got "
                f"{[type(layer).__name__ for layer in layers]}"
            )
        self.first = nnx.List([first for first, _ in layers])
        self.second = nnx.List([second for _, second in layers])

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x1: jax.Array,
        x2: jax.Array | None = None,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs both streams through all layers.

        Args:
          x1: `(B, T, D)`.
          x2: `(B, T, D)`; default `x1`, as in Reformer, which concatenates the two results.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, 0 is padding.
          rngs: `nnx.Rngs` or a key for dropout; None disables dropout. Each F and G gets a separate
            key, which the backward pass reuses.

        Returns:
          `(y1, y2)`, `(B, T, D)` in the dtypes of `x1` and `x2`.

        Raises:
          ValueError: streams of unequal shapes, or an argument that no module of the stack takes.
        """
        x1 = checks.as_array("x1", x1)
        x2 = x1 if x2 is None else checks.as_array("x2", x2)
        if x1.ndim != 3 or x1.shape != x2.shape:
            raise ValueError(
                f"x1 and x2 must have one shape (batch, length, features), got {x1.shape} and "
                f"{x2.shape}"
            )
        given = {"lengths": lengths, "segment_ids": segment_ids, "rngs": dropout_key(rngs)}
        given = {name: checks.as_array(name, x) for name, x in given.items() if x is not None}
        modules = [m for pair in zip(self.first, self.second, strict=True) for m in pair]
        for name in given.keys() - {"rngs"}:
            if not any(_takes(module, name) for module in modules):
                raise ValueError(
                    f"{name} was given, but no module of the stack takes it; leave {name} out"
                )
        valid = valid_tokens(x1.shape[1], given.get("lengths"), given.get("segment_ids"))
        wide = dtypes.wide(x1, x2)
        streams = tuple(zero_padding(x, valid).astype(wide) for x in (x1, x2))
        arrays, structures = zip(*map(jax.tree.flatten, modules), strict=True)
        run = _reversible(structures, (x2.dtype, x1.dtype))
        y1, y2 = run(None, arrays, given, streams)
        return y1.astype(x1.dtype), y2.astype(x2.dtype)


def _takes(module: Any, name: str) -> bool:
    return name in inspect.signature(type(module).__call__).parameters


def _reversible(structures, dtypes):
    """Function `(None, arrays, given, streams) -> streams` of the stack.

    Args:
      structures: tree structures of the modules F, G, F, G, ...; `arrays` are their leaves.
      dtypes: dtypes of the inputs of F and of G.
    """

    def call(place, arrays, x, given):
        module = jax.tree.unflatten(structures[place], arrays)
        keywords = {name: array for name, array in given.items() if _takes(module, name)}
        if "rngs" in keywords:
            keywords["rngs"] = jax.random.fold_in(keywords["rngs"], place)
        return module(x.astype(dtypes[place % 2]), **keywords).astype(x.dtype)

    def run(_, arrays, given, streams):
        kept, read = streams
        for place, own in enumerate(arrays):
            # A module reads one stream and adds its output to the other stream.
            kept, read = read, kept + call(place, own, read, given)
        return kept, read

    def forward(_, arrays, given, streams):
        streams = run(_, arrays, given, streams)
        return streams, (arrays, given, streams)

    def backward(_, saved, cotangents):
        arrays, given, (kept, read) = saved
        of_kept, of_read = cotangents
        gradients = []
        for place, own in reversed(list(enumerate(arrays))):
            # The stream that this module wrote is the stream that the next module reads.
            written, read = read, kept

            def step(own, read, written, of_read, of_written, given, place=place):
                added, pull_back = jax.vjp(lambda own, x: call(place, own, x, given), own, read)
                of_own, of_input = pull_back(of_written)
                floats = [g for g in of_own if g.dtype != jax.dtypes.float0]
                return written - added, of_read + of_input, floats

            kept, of_input, floats = _at_once(step, own, read, written, of_kept, of_read, given)
            of_kept, of_read = of_read, of_input
            gradients.append(_with_integers(own, floats))
        return tuple(gradients[::-1]), None, (of_kept, of_read)

    return with_derivatives(run, forward, backward)


def _with_integers(arrays, gradients):
    """Cotangents of all arrays: `gradients` for floating-point arrays, float0 for others."""
    each = iter(gradients)
    return [
        next(each) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
        for x in arrays
    ]


def _at_once(step, *args):
    """Computes `step(*args)` inside `lax.cond`, so that XLA schedules the whole step at once.

    Otherwise XLA may delay parameter gradients to the end of the backward pass, and keep the
    activations that the gradients need in memory until then.
    """
    shapes = jax.eval_shape(step, *args)
    always = lax.optimization_barrier(jnp.array(True))

    def never(*args):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return lax.cond(always, step, never, *args)
