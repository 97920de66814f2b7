"""Language model whose layers are divided among the devices of a mesh axis."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from effattn.arrays import mesh_axes
from effattn.cores.experts import RoutingStats
from effattn.nn.experts import MixtureOfExperts
from effattn.nn.language_model import TransformerLM
from effattn.nn.placement import ACTIVATIONS, RULES, shardings
from effattn.nn.routing import Centroids
from effattn.nn.tokens import token_ids
from effattn.parallel.mixers import tokens_in_parts
from effattn.parallel.pipeline import pipeline

STAGE, SEQUENCE = "stage", "sequence"


class PipelinedLM(TransformerLM):
    """Language model in S stages of as many layers, for the mesh axis `stage`.

    The variables of the layers are stacked: those of layer s L/S + i, in stage s, are entry s of
    the arrays of `stages[i]`. `nn.shardings` places each entry on the devices of its stage.
    `pipelined_loss` passes microbatches through the stages (Huang et al. 2019, "GPipe"). All
    methods of `TransformerLM` work too, and gather one layer after the other.

    Args:
      model: a model. The new one shares its embeddings, norm and head, and copies its layers.
      stages: S, a divisor of the number of layers L.

    Raises:
      ValueError: S does not divide L, layers of different stages differ in more than their
        arrays, the model has centroids (`RoutingSelfAttention`), or its layers share keys.
    """

    def __init__(self, model: TransformerLM, stages: int):
        # Does not call `super().__init__`, which would make new variables.
        self.config = model.config
        self.embed, self.positions = model.embed, model.positions
        self.norm, self.head = model.norm, model.head
        layers = list(model.blocks)
        if stages < 1 or len(layers) % stages:
            raise ValueError(
                f"stages must divide the number of layers, {len(layers)}, got {stages}"
            )
        if model.config.keys_from is not None:
            raise ValueError(
                "a model whose layers share keys and values (keys_from) cannot be divided in stages"
            )
        if model.config.value_residual:
            raise ValueError(
                "a model with value_residual=True cannot be divided in stages, as all layers read "
                "the values of the first layer"
            )
        if model.config.reversible:
            raise ValueError(
                "a model with reversible=True cannot be divided in stages, as its backward pass "
                "starts at the streams after the last layer"
            )
        if jax.tree.leaves(nnx.state(model, Centroids)):
            raise ValueError("a model with centroids cannot be divided in stages")
        self.stages = nnx.List(
            [_stacked(layers, first, stages) for first in range(len(layers) // stages)]
        )

    @property
    def blocks(self) -> list[Any]:  # type: ignore[override]
        """Copies of the layers, each with its own variables; changes stay in the copies."""
        count = len(jax.tree.leaves(nnx.state(self.stages[0]))[0])
        return [_entry(block, stage) for stage in range(count) for block in self.stages]

    def pipelined_loss(
        self,
        tokens: jax.Array,
        targets: Any,
        loss: Callable[[jax.Array, Any], jax.Array],
        *,
        schedule: str = "1f1b",
        routing_loss: Callable[[RoutingStats], jax.Array] | None = None,
    ) -> jax.Array:
        """Returns the sum of the losses of M microbatches, which pass the stages one after another.

        Call it in a mesh with an axis `stage` that is set by `jax.set_mesh`. The `nnx.Param`s have
        gradients; there is no dropout. `effattn.parallel.pipeline` explains the schedules. Within a
        stage, other axes of the mesh divide rows, tokens, heads and features as in `TransformerLM`.
        Gradients are summed over rows once, after the last microbatch; with experts, which choose
        among the tokens of all rows, in each step of the pipeline.

        Args:
          tokens: `(M, B, T)` int, from 0 to V - 1; others give NaN.
          targets: arrays `(M, B, T, ...)`.
          loss: `(logits (B, T, V), target (B, T, ...)) -> ()`, a sum over rows and tokens. A device
            calls it with its rows and its part of the tokens. Arrays that it closes over are
            constants, without gradients.
          schedule: "1f1b", or "gpipe", which takes less time for the loss without its gradients.
          routing_loss: loss of the statistics of a layer's experts, which is added for each
            microbatch; without it these losses are left out.

        Raises:
          ValueError: tokens of another shape; the mesh is not automatic, or the size of its axis
            `stage` is not the number of stages; its axis `sequence` does not divide the tokens, or
            the model has experts or a mixer without a form of its own along it; there are too few
            learned positions.
        """
        if tokens.ndim != 3:
            raise ValueError(f"tokens must have shape (M, B, T), got {tokens.shape}")
        mesh = jax.sharding.get_abstract_mesh()
        self._check_mesh(mesh, tokens.shape[2])
        self._check_columns(tokens.shape[2])
        graph, state = nnx.split(self)

        def passed(state, tokens, targets):
            model = nnx.merge(graph, state)
            return model._pass(mesh, tokens, targets, loss, schedule, routing_loss)

        # Compiled programs alone place arrays of other devices on the mesh.
        return jax.jit(passed)(state, tokens, targets)

    def _pass(self, mesh, tokens, targets, loss, schedule, routing_loss):
        graph, (trained, others) = _split(self.stages)
        count, batch, time = tokens.shape
        parts, rows = mesh.shape.get(SEQUENCE, 1), self._rows(mesh, batch)
        end_graph, (end_trained, end_others) = _split(self._end())
        # Gathered along `fsdp` once, and not for each microbatch.
        trained, end_trained = (_gathered(each, mesh) for each in (trained, end_trained))
        positions = jnp.broadcast_to(jnp.arange(time), (batch, time))
        x = jax.vmap(lambda rows: self._embed(token_ids(rows), positions, None))(tokens)
        x = mesh_axes.constrained(x, ((), *ACTIVATIONS))
        # Kernels run only where all axes are manual, so those of size 1 are too. Heads, features
        # and experts are left to the compiler.
        manual = {STAGE, SEQUENCE, *rows, *(name for name, size in mesh.shape.items() if size == 1)}
        manual &= {*mesh.axis_names}
        summed = (*rows, *[SEQUENCE] * (parts > 1))
        others_exchange = mesh.size > math.prod(mesh.shape[name] for name in (STAGE, *rows))

        def run(trained, others, end_trained, end_others, x, targets):
            own, fixed = jax.tree.map(lambda leaf: leaf[0], (trained, others))

            def stage(own, carry):
                x, more = carry
                for block in nnx.merge(graph, own, fixed):
                    x = mesh_axes.constrained(x, ACTIVATIONS)
                    x, routing, _ = self._block(block, x, {}, None, None)
                    if routing_loss is not None:
                        more = more + sum(map(routing_loss, routing))
                return x, more

            def end(end_trained, carry, target):
                (x, more), model = carry, nnx.merge(end_graph, end_trained, end_others)
                # Whole along the vocabulary: XLA fails for a gather along a divided axis here.
                logits = mesh_axes.constrained(model._logits(model.norm(x)), ACTIVATIONS)
                return loss(logits, target) + more

            # Losses of experts so far; each part of the tokens has its own.
            more = mesh_axes.vary_like(x, jnp.zeros(count))
            passed = pipeline(stage, end, STAGE, schedule, lockstep=others_exchange)
            total = count * passed(own, end_trained, (x, more), targets)
            return lax.psum(total, summed) if summed else total

        divided, whole = PartitionSpec(STAGE), PartitionSpec()
        # A mixer cannot begin a `jax.shard_map` over `sequence` in one over `stage`: JAX does not
        # lower the gradients.
        of_tokens = PartitionSpec(None, rows, SEQUENCE if parts > 1 else None)
        with tokens_in_parts() if parts > 1 else contextlib.nullcontext():
            return jax.shard_map(
                run,
                in_specs=(divided, divided, whole, whole, of_tokens, of_tokens),
                out_specs=whole,
                axis_names=manual,
            )(trained, others, end_trained, end_others, x, targets)

    def _rows(self, mesh, batch):
        """The mesh axes whose devices have their own rows in a stage."""
        if any(isinstance(block.feed_forward, MixtureOfExperts) for block in self.stages):
            return ()
        rows = tuple(name for name in ACTIVATIONS[0] if mesh.shape.get(name, 1) > 1)
        return () if batch % math.prod(mesh.shape[name] for name in rows) else rows

    def _check_mesh(self, mesh, time):
        """Raises `ValueError` unless the mesh fits the stages, and divides the tokens in parts."""
        stages = len(jax.tree.leaves(nnx.state(self.stages))[0])
        parts = mesh.shape.get(SEQUENCE, 1)
        if mesh.shape.get(STAGE) != stages:
            raise ValueError(
                f"the mesh must have an axis {STAGE!r} of size {stages}, the number of stages; set "
                f"it by jax.set_mesh. Its axes are {dict(mesh.shape) or 'none'}"
            )
        if {*mesh.axis_types} != {AxisType.Auto}:
            raise ValueError("the axes of the mesh must be automatic (jax.sharding.AxisType.Auto)")
        if parts == 1:
            return
        if time % parts:
            raise ValueError(
                f"the axis {SEQUENCE!r} of the mesh, {parts}, must divide the tokens, {time}"
            )
        if any(isinstance(block.feed_forward, MixtureOfExperts) for block in self.stages):
            raise ValueError(
                f"a model with experts and stages needs a mesh without an axis {SEQUENCE!r}, got "
                f"size {parts}: experts choose among all tokens"
            )

    def _end(self) -> "PipelinedLM":
        """The final norm and the output projection, with tied embeddings if it has them."""
        model: Any = nnx.clone(self)
        model.stages, model.positions = nnx.List([]), None
        if model.head is not None:
            model.embed = None
        return model


def _split(module):
    """The structure of a module, and the states of its parameters and of its other variables."""
    graph, *states = nnx.split(module, nnx.Param, ...)
    return graph, states


def _stacked(layers, first, stages):
    """The layers of all stages at place `first`, as one module with a leading axis of stages."""
    chosen = layers[first :: len(layers) // stages]
    graphs, states = zip(*map(nnx.split, chosen), strict=True)
    for number, graph in enumerate(graphs[1:], 1):
        if graph != graphs[0]:
            other = first + number * len(layers) // stages
            raise ValueError(
                f"the stages must have the same layers, but layer {other} is built differently "
                f"from layer {first}; choose mechanisms that repeat in each of the {stages} stages "
                "with options that do not depend on the layer"
            )

    def stacked(*variables):
        names = variables[0].get_metadata().get("out_sharding")
        value = jnp.stack([variable.get_value() for variable in variables])
        return variables[0].replace(value, out_sharding=("stages", *(names or ())))

    return nnx.merge(graphs[0], jax.tree.map(stacked, *states, is_leaf=_is_variable))


def _gathered(state, mesh):
    """The parameters, divided by all axes of `RULES` but `fsdp`."""
    rules = {name: axis for name, axis in RULES.items() if axis != "fsdp"}

    def of(variable, place):
        value = lax.with_sharding_constraint(variable.get_value(), place.get_value())
        return variable.replace(value)

    return jax.tree.map(of, state, shardings(state, mesh, rules), is_leaf=_is_variable)


def _entry(block, stage):
    """The layer of one stage."""
    graph, state = nnx.split(block)

    def of(variable):
        names = variable.get_metadata()["out_sharding"][1:]
        return variable.replace(variable.get_value()[stage], out_sharding=names or None)

    return nnx.merge(graph, jax.tree.map(of, state, is_leaf=_is_variable))


def _is_variable(leaf):
    return isinstance(leaf, nnx.Variable)
