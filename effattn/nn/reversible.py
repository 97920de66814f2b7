"""Reversible residual layers, which do not store activations for the backward pass."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.extend import core as jex_core

from effattn.arrays import checks, dtypes, mesh_axes, segments
from effattn.arrays.linear_map import with_derivatives
from effattn.decode.state import row_lengths
from effattn.nn.dropout import dropout_key
from effattn.nn.module import Module
from effattn.nn.tokens import checked_ids, zero_padding

# Maps the stream that a part reads to what it adds to the other stream, and to further results.
Part = Callable[[jax.Array], tuple[jax.Array, Any]]


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

    For whole models see the option `reversible` of `TransformerConfig`.

    Args:
      *layers: pairs (F, G) of modules from `(B, T, D)` to `(B, T, D)`. A module gets those of the
        arguments `lengths`, `segment_ids` and `rngs` that its signature names. Modules must not
        write Variables. Modules are not copied: a module given twice shares its parameters.

    Raises:
      ValueError: no layers, or a layer that is not a pair of callables.
    """

    def __init__(self, *layers: Sequence[Any]):
        if not layers or not all(_is_pair(layer) for layer in layers):
            raise ValueError(
                "layers must be one or more pairs (F, G) of modules, got "
                f"{[_types(layer) for layer in layers]}"
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
          ValueError: streams of unequal shapes, lengths or segment ids of other shapes, or
            `lengths` or `segment_ids` that no module of the stack takes.
        """
        x1 = checks.as_array("x1", x1)
        x2 = x1 if x2 is None else checks.as_array("x2", x2)
        if x1.ndim != 3 or x1.shape != x2.shape:
            raise ValueError(
                f"x1 and x2 must have one shape (batch, length, features), got {x1.shape} and "
                f"{x2.shape}"
            )
        batch, time, _ = x1.shape
        given: dict[str, Any] = {}
        if lengths is not None:
            given["lengths"] = row_lengths(lengths, batch, time)
        if segment_ids is not None:
            given["segment_ids"] = checked_ids(segment_ids, batch, time)
        if rngs is not None:
            given["rngs"] = dropout_key(rngs)
        modules = [m for pair in zip(self.first, self.second, strict=True) for m in pair]
        for name in given.keys() - {"rngs"}:
            if not any(_takes(module, name) for module in modules):
                raise ValueError(
                    f"{name} was given, but no module of the stack takes it; leave {name} out"
                )
        valid = segments.valid(given.get("lengths"), given.get("segment_ids"), time)
        x1, x2 = (zero_padding(x, valid) for x in (x1, x2))

        def part_of(place, module):
            keywords: dict[str, Any]
            keywords = {name: array for name, array in given.items() if _takes(module, name)}
            if "rngs" in keywords:
                keywords["rngs"] = jax.random.fold_in(keywords["rngs"], place)
            return lambda x: (module(x, **keywords), None)

        parts = [part_of(place, module) for place, module in enumerate(modules)]
        (y1, y2), _ = run(parts, x1, x2)
        return y1.astype(x1.dtype), y2.astype(x2.dtype)


def _is_pair(layer: Any) -> bool:
    return isinstance(layer, Sequence) and len(layer) == 2 and all(map(callable, layer))


def _types(layer: Any) -> Any:
    """Names of the types of a layer's members, for an error message."""
    is_pair = isinstance(layer, tuple | list)
    return [type(each).__name__ for each in layer] if is_pair else type(layer).__name__


def _takes(module: Any, name: str) -> bool:
    return name in inspect.signature(type(module).__call__).parameters


def run(
    parts: Sequence[Part], x1: jax.Array, x2: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], list[Any]]:
    """Runs two streams through the parts, each of which reads what the part before it has written.

    The first part reads x2 and adds to x1, the second reads the sum and adds to x2, and so on. The
    gradients of all arrays that the parts close over are computed with recomputed streams.

    Args:
      parts: functions of one stream, in the dtype of x2, x1, x2, ...
      x1: `(B, T, D)`.
      x2: `(B, T, D)`.

    Returns:
      `(streams, further)`: the stream that the last part read and the one that it wrote, in at
      least float32, and the further results of each part.
    """
    wide = dtypes.wide(x1, x2)
    traced = [_Traced(part, (x2, x1)[place % 2]) for place, part in enumerate(parts)]
    reversible = _reversible(traced)
    streams, further = reversible(
        None,
        [part.floats for part in traced],
        [part.others for part in traced],
        (x1.astype(wide), x2.astype(wide)),
    )
    each = zip(traced, further, strict=True)
    return streams, [jax.tree.unflatten(part.structure, leaves) for part, leaves in each]


class _Traced:
    """A part as a function of one stream and of all arrays that it closes over.

    Attributes:
      floats: the arrays that it closes over and that may have gradients.
      others: all others, such as lengths and random keys.
      structure: tree structure of its further results.
    """

    def __init__(self, part: Part, like: jax.Array):
        self.dtype = like.dtype
        closed, (_, further) = jax.make_jaxpr(part, return_shape=True)(like)
        self._jaxpr, self.structure = closed.jaxpr, jax.tree.structure(further)
        arrays = [jnp.asarray(x) for x in closed.consts]
        self._is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
        chosen = list(zip(arrays, self._is_float, strict=True))
        self.floats = [x for x, is_float in chosen if is_float]
        self.others = [x for x, is_float in chosen if not is_float]

    def __call__(self, floats: Any, others: Any, x: jax.Array) -> tuple[jax.Array, list[Any]]:
        """The output for x, in the dtype of x, and the leaves of the further results."""
        each = {True: iter(floats), False: iter(others)}
        consts = [next(each[is_float]) for is_float in self._is_float]
        call = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(self._jaxpr, consts))
        added, *further = call(x.astype(self.dtype))
        return added.astype(x.dtype), further


def _reversible(parts):
    """Function `(None, floats, others, streams) -> (streams, further)` of all parts."""

    def run(_, floats, others, streams):
        kept, read = streams
        further = []
        for part, *own in zip(parts, floats, others, strict=True):
            # A part reads one stream and adds its output to the other stream.
            added, more = part(*own, read)
            kept, read = read, kept + added
            further.append(more)
        return (kept, read), further

    def forward(_, floats, others, streams):
        streams, further = run(_, floats, others, streams)
        return (streams, further), (floats, others, streams)

    def backward(_, saved, cotangents):
        floats, others, (kept, read) = saved
        (of_kept, of_read), of_further = cotangents
        gradients = []
        each = list(zip(parts, floats, others, of_further, strict=True))
        for part, own, fixed, of_more in reversed(each):
            # The stream that this part wrote is the stream that the next part reads.
            written, read = read, kept

            def step(own, fixed, of_more, read, written, of_read, of_written, part=part):
                (added, _), pull_back = jax.vjp(lambda own, x: part(own, fixed, x), own, read)
                of_own, of_input = pull_back((of_written, of_more))
                return written - added, of_read + of_input, of_own

            given = own, fixed, of_more, read, written, of_kept, of_read
            kept, of_input, of_own = _all_steps(step, *given)
            of_kept, of_read = of_read, of_input
            gradients.append(of_own)
        return gradients[::-1], None, (of_kept, of_read)

    return with_derivatives(run, forward, backward)


def _all_steps(step, *args):
    """Computes `step(*args)` inside `lax.cond`, so that XLA schedules the whole step at once.

    Otherwise XLA may delay parameter gradients to the end of the backward pass, and keep the
    activations that the gradients need in memory until then.
    """
    shapes = jax.eval_shape(step, *args)
    always = lax.optimization_barrier(jnp.array(True))

    def never(*args):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return lax.cond(always, step, never, *args)
