"""Training on the devices of a mesh: where parameters, optimiser states and batches live."""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from effattn import nn, parallel
from effattn.arrays import mesh_axes
from effattn.nn import placement
from experiments.harness import checks
from experiments.harness.errors import UserError
from experiments.harness.options import Options
from experiments.tasks.task import Batch, Task


class Devices:
    """Devices of a run: one device, or those of a mesh.

    Args:
      sizes: sizes of the mesh by axis; None for the default device.

    Raises:
      UserError: the sizes do not fit the number of devices.
    """

    def __init__(self, sizes: Mapping[str, Any] | None = None):
        try:
            self.mesh = None if sizes is None else parallel.make_mesh(**sizes)
        except ValueError as error:
            raise UserError(f"--mesh: {error}") from error

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Context that sets the mesh for code that is traced within."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def in_stages(self, build: Callable[[nnx.Rngs], Any]) -> Callable[[nnx.Rngs], Any]:
        """The function that builds the model in the stages of the mesh, if it has several."""
        stages = 1 if self.mesh is None else self.mesh.shape["stage"]
        if stages == 1:
            return build
        return lambda rngs: nn.PipelinedLM(build(rngs), stages)

    def everywhere(self) -> NamedSharding | None:
        """The sharding of an array that each device has; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def training_shardings(
        self, model: nnx.Module, groups: Callable[[Any], Any], params: Any, state: Any
    ) -> tuple[Any, Any]:
        """The shardings of the parameters and of the optimiser's state; None without a mesh.

        Args:
          model: the model; shapes suffice.
          groups: function from a state of NNX to the parameters.
          params: the parameters; shapes suffice.
          state: the optimiser's state; shapes suffice.
        """
        if self.mesh is None:
            return None, None
        of_params = groups(nn.shardings(model, self.mesh))
        trained = params["trained"], of_params["trained"]
        return of_params, placement.shardings_like(state, *trained, self.mesh)

    def put(self, batch: Batch) -> Batch:
        """Places a batch `(n, B, ...)`: rows and tokens divided, if they are a multiple."""
        if (mesh := self.mesh) is None:
            return batch

        def place(x: np.ndarray) -> jax.Array:
            spec = mesh_axes.dividing(mesh.shape, x.shape, ((), *placement.ACTIVATIONS))
            where = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

        return jax.tree.map(place, batch)


ONE_DEVICE = Devices()


def check(options: Options, task: Task) -> None:
    """Raises `UserError` unless the mesh of the options fits the devices and the batches."""
    mesh = Devices(checks.mesh_sizes(options.mesh)).mesh
    assert mesh is not None
    count = options.batch // options.accumulate
    rows = math.prod(mesh.shape[axis] for axis in placement.ACTIVATIONS[0])
    if count % rows:
        raise UserError(
            f"--mesh: data x fsdp x expert, {rows}, must divide --batch / --accumulate, {count}; "
            "choose another --batch"
        )
    if (devices := mesh.shape["expert"]) > 1 and options.experts is None:
        raise UserError(
            f"--mesh: expert={devices} needs --experts, a multiple of {devices}; or use "
            f"data={devices}"
        )
    if mesh.shape["stage"] > 1:
        _check_stages(mesh, options, task)
    _must_divide(mesh, "expert", options.experts or 1, "--experts", "choose other --experts")
    (example, *_), _ = task.training(1, options.seeds[0], 0)
    given = {
        "tensor": (options.heads, "--heads", "--heads"),
        "sequence": (example.shape[1], "the tokens of a training example", "--mesh"),
    }
    for axis, (count, what, remedy) in given.items():
        _must_divide(mesh, axis, count, what, f"choose another {remedy}")


def _check_stages(mesh: Mesh, options: Options, task: Task) -> None:
    stages = f"--mesh: stage={mesh.shape['stage']}"
    if task.model != "language_model":
        kind = task.model.replace("_", " ")
        raise UserError(f"{stages} divides the layers of language models; this task has a {kind}")
    if options.with_costs:
        raise UserError(
            f"{stages} must be left out: this experiment adds the costs of mechanisms to the loss"
        )
    if options.redraw:
        raise UserError(f"{stages} cannot be combined with --redraw; leave one of them out")
    if options.experts and mesh.shape["sequence"] > 1:
        raise UserError(
            f"{stages} with sequence cannot be combined with --experts; leave one of them out"
        )
    _must_divide(mesh, "stage", options.layers, "--layers", "choose another --layers")


def check_model(options: Options, build: Callable[[nnx.Rngs], nnx.Module], task: Task) -> None:
    """Raises an error unless the mesh divides a model.

    Raises:
      UserError: the mesh does not divide the hidden features.
      ValueError: the model cannot be divided in stages.
    """
    devices = Devices(checks.mesh_sizes(options.mesh))
    mesh = devices.mesh
    assert mesh is not None
    if mesh.shape["stage"] > 1:
        (example, *_), _ = task.training(options.batch // options.accumulate, 0, 0)
        tokens = example[None]

        def staged() -> jax.Array:
            model = devices.in_stages(build)(nnx.Rngs(0))
            return model.pipelined_loss(tokens, tokens, lambda logits, _: logits.sum())

        with devices.tracing():
            nnx.eval_shape(staged)
    for _, module in nnx.iter_modules(nnx.eval_shape(lambda: build(nnx.Rngs(0)))):
        remedy = "pass --no-equal-parameters, or choose another --width"
        if isinstance(module, nn.FeedForward):
            _must_divide(mesh, "tensor", module.up.out_features, "the hidden features", remedy)
        if isinstance(module, nn.MixtureOfExperts):
            count = module.up_kernels.shape[-1]
            _must_divide(mesh, "tensor", count, "the hidden features of experts", remedy)


def _must_divide(mesh, axis, count, what, remedy):
    if count % mesh.shape[axis]:
        raise UserError(f"--mesh: {axis}={mesh.shape[axis]} must divide {what}, {count}; {remedy}")
