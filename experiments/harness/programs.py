"""Compiled programs of one model: initialisation, training step and evaluation."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from effattn.nn import Centroids, MixtureOfExperts, PipelinedLM, RoutingStats
from experiments.harness import checks, machine
from experiments.harness.loss_scale import LossScale
from experiments.harness.meshes import ONE_DEVICE, Devices
from experiments.harness.optimisers import make_optimiser
from experiments.harness.schedules import Schedule
from experiments.tasks.task import NOTHING, Batch, Scores, Task

if TYPE_CHECKING:
    from experiments.harness.options import Options

# Arrays of a model: "trained" parameters; "moved" centroids, which training steps update; "fixed"
# variables such as random features, which are the same for all seeds, and which `redraw` replaces.
Params = dict[str, Any]

# Factors of the auxiliary losses of experts, which are summed over the layers: Fedus et al. 2021,
# "Switch Transformers", and Zoph et al. 2022, "ST-MoE".
LOAD_BALANCING, ROUTER_Z = 0.01, 0.001


class ByShape:
    """A function that is compiled once for each shape of its last argument.

    Args:
      function: function of arrays.
      devices: devices on which it runs; the last argument is placed there.
      **options: of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], devices: Devices = ONE_DEVICE, **options: Any):
        self._jitted, self._devices = jax.jit(function, **options), devices
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def knows(self, last: Any) -> bool:
        """Returns whether the function is compiled for this shape."""
        return _shapes(last) in self._compiled

    def warm_up(self, *arguments: Any) -> None:
        """Compiles the function for these shapes, and calls it once, as a first call is slower."""

        def zeros(x: Any) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype, device=getattr(x, "sharding", None))

        jax.block_until_ready(self(*jax.tree.map(zeros, arguments)))

    def __call__(self, *arguments: Any) -> Any:
        *others, last = arguments
        key, last = _shapes(last), self._devices.put(last)
        with self._lock, self._devices.tracing():
            if key not in self._compiled:
                self._compiled[key] = self._jitted.lower(*others, last).compile()
        return self._compiled[key](*others, last)

    @property
    def temporary_bytes(self) -> int:
        """Largest memory of the compiled programs, without arguments and results."""
        with self._lock:
            memories = [program.memory_analysis() for program in self._compiled.values()]
        # CPUs, GPUs and TPUs report it.
        return max((memory.temp_size_in_bytes for memory in memories if memory), default=0)


def _shapes(tree: Any) -> tuple[Any, ...]:
    return tuple((np.shape(leaf), np.dtype(leaf.dtype).name) for leaf in jax.tree.leaves(tree))


class ProgramCache:
    """Compiled programs by mechanism, which runs of several seeds share.

    It is emptied when few memory mappings are left (`machine.is_full`).

    Args:
      make: function from a mechanism's name to its programs.
    """

    def __init__(self, make: Callable[[str], "Programs"]):
        self._make, self._lock = make, threading.Lock()
        self._kept: dict[str, Programs] = {}

    def __call__(self, mechanism: str) -> "Programs":
        with self._lock:  # two runs of a mechanism may start at the same time
            if machine.is_full():
                self._kept.clear()
                machine.forget_programs()
            if mechanism not in self._kept:
                self._kept[mechanism] = self._make(mechanism)
            return self._kept[mechanism]


class Programs:
    """Compiled programs of one model, for any seed and learning rate.

    Args:
      build: builds a model that maps the inputs of a batch to logits.
      optimiser: optimiser for a peak learning rate of 1.
      schedule: number and size of the training steps.
      task: task that the model learns.
      precision: computation dtype; "float16" scales the loss.
      redraw: steps between new random features; 0 for never.
      devices: devices of the run. On a mesh, each has its part of parameters and batches, and all
        have the scores.
      with_costs: whether the mean cost of a token in mixtures of mechanisms is added to the loss of
        training; only for language models without experts.

    Attributes:
      init: `seed () int -> (params, optimiser_state)`.
      step: `(params, optimiser_state, learning_rate (), batch) -> (params, optimiser_state, loss)`.
        The arrays of the batch are `(A, B, ...)`: gradients of the A microbatches are added. The
        loss is the mean over all targets.
        The program reuses the memory of `params` and `optimiser_state`.
      evaluate: `(params, batch) -> scores`; the arrays of batch and scores are `(n, B, ...)`.
      draw: `(params, number () int) -> params` with new random features.
      load: `(params, batch) -> (load (L, E), dropped (L,))` of the L layers that have E experts.
      has_experts: whether the model has experts.
      parameters: number of trained parameters.
      state_bytes: size of one row's decode state at the length of the validation set; None if the
        model does not decode.
      redraw: as the argument; 0 if the model has no random features.
      devices: as the argument.
      shardings: those of `params`; None on one device.
    """

    def __init__(
        self,
        build: Callable[[nnx.Rngs], nnx.Module],
        optimiser: optax.GradientTransformation,
        schedule: Schedule,
        task: Task,
        precision: str = "float32",
        redraw: int = 0,
        devices: Devices = ONE_DEVICE,
        with_costs: bool = False,
    ):
        self._build, self._optimiser = devices.in_stages(build), optimiser
        self.devices = devices
        self._with_costs = with_costs
        self._scale = LossScale(dynamic=precision == "float16")
        model = nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))
        self._has_stages = isinstance(model, PipelinedLM)
        self._graph = nnx.split(model, *_GROUPS)[0]
        modules = [module for _, module in nnx.iter_modules(model)]
        self.has_experts = any(isinstance(module, MixtureOfExperts) for module in modules)
        self.redraw = redraw if any(hasattr(module, "redraw") for module in modules) else 0
        params, state = jax.eval_shape(self._init, 0)
        found = devices.training_shardings(model, _params_of, params, state)
        (of_params, of_state), everywhere = self._with_further(found), devices.everywhere()
        self.shardings = of_params
        self.init = jax.jit(self._init, out_shardings=(of_params, of_state))
        self.step = ByShape(
            self.one_step,
            devices,
            donate_argnums=(0, 1),
            out_shardings=(of_params, of_state, everywhere),
        )
        self.evaluate = ByShape(self._evaluate, devices, out_shardings=everywhere)
        self.load = ByShape(self._load, devices, out_shardings=everywhere)
        self.draw = ByShape(self._draw, out_shardings=of_params)
        self.parameters = _total(params["trained"], lambda leaf: leaf.size)
        self.state_bytes = None
        if task.model == "language_model" and task.is_causal:
            (validation, *_) = task.held_out().values()
            self.state_bytes = self._state_bytes(params, validation.targets.shape[1])

    def _with_further(self, shardings: tuple[Any, Any]) -> tuple[Any, Any]:
        """The shardings of parameters and optimiser state, with those that a subclass adds."""
        return shardings

    def model(self, params: Params) -> Any:
        """Returns the module with these parameters."""
        return nnx.merge(self._graph, params["trained"], params["moved"], params["fixed"])

    def _init(self, seed: jax.Array) -> tuple[Params, Any]:
        params = _params_of(self._build(nnx.Rngs(jax.random.key(seed))))
        params["fixed"] = _params_of(self._build(nnx.Rngs(0)))["fixed"]
        return params, (self._optimiser.init(params["trained"]), self._scale.init())

    def _draw(self, params: Params, number: jax.Array) -> Params:
        """Returns the parameters with new random features; `number` is the seed of the draw."""
        model = self.model(params)
        rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(0), number))
        for _, module in nnx.iter_modules(model):
            if hasattr(module, "redraw"):
                module.redraw(rngs)
        return {**params, "fixed": _params_of(model)["fixed"]}

    def _scores(self, params: Params, batch: Batch) -> tuple[Scores, Any]:
        """Scores, and the further losses of training."""
        logits, others = self._logits(self.model(params), batch)
        right = (logits.argmax(-1) == batch.targets) & (batch.targets != NOTHING)
        return Scores(_nats(logits, batch.targets), right), others

    def _logits(self, model: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Logits, and the sum of further losses: those of experts, or the mean cost of a token."""
        if self.has_experts:
            logits, routing = model.with_routing(*batch.inputs)
            return logits, jnp.stack([*map(_of_experts, routing)]).sum()
        if self._with_costs:
            logits, costs = model.with_costs(*batch.inputs)
            return logits, costs.mean()
        return model(*batch.inputs), jnp.zeros(())

    def _in_turn(self, params: Params, scale: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """The loss, and the gradients of the scaled loss: one microbatch after the other."""
        count = (batch.targets != NOTHING).sum()

        def scaled_loss(trained, microbatch):
            scores, others = self._scores({**params, "trained": trained}, microbatch)
            loss = scores.nats.sum() / count + others / len(batch.targets)
            return self._scale.up(loss, scale), loss

        def add(total, microbatch):
            (_, loss), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(
                params["trained"], microbatch
            )
            return jax.tree.map(jnp.add, total, (loss, gradients)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params["trained"]))
        return jax.lax.scan(add, zero, batch)[0]

    def _in_stages(self, params: Params, scale: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """As `_in_turn`, with the microbatches in the stages of a `PipelinedLM`."""
        count = (batch.targets != NOTHING).sum()

        def scaled(logits, targets):
            return self._scale.up(_nats(logits, targets).sum() / count, scale)

        def of_experts(stats):
            return self._scale.up(_of_experts(stats) / len(batch.targets), scale)

        def scaled_loss(trained):
            model = self.model({**params, "trained": trained})
            routing_loss = of_experts if self.has_experts else None
            return model.pipelined_loss(
                *batch.inputs, batch.targets, scaled, routing_loss=routing_loss
            )

        loss, gradients = jax.value_and_grad(scaled_loss)(params["trained"])
        return self._scale.down(loss, scale), gradients

    def one_step(self, params: Params, state: Any, learning_rate: jax.Array, batch: Batch) -> Any:
        """Returns `(params, optimiser_state, loss)` after a step; see the attribute `step`."""
        trained, (state, scale) = params["trained"], state
        differentiated = self._in_stages if self._has_stages else self._in_turn
        loss, gradients = differentiated(params, scale, batch)

        def update(gradients, state):
            updates, state = self._optimiser.update(gradients, state, trained)
            updates = jax.tree.map(lambda update: learning_rate * update, updates)
            return optax.apply_updates(trained, updates), state

        (trained, state), scale = self._scale.update(update, gradients, (trained, state), scale)
        inputs = [x.reshape(-1, *x.shape[2:]) for x in batch.inputs]
        params = self._move({**params, "trained": trained}, inputs)
        return params, (state, scale), loss

    def _move(self, params: Params, inputs: Sequence[jax.Array]) -> Params:
        if not params["moved"]:
            return params
        moving = self.model(params)
        moving.update_centroids(*inputs)
        return {**params, "moved": _params_of(moving)["moved"]}

    def _evaluate(self, params: Params, batch: Batch) -> Scores:
        return jax.lax.map(lambda part: self._scores(params, part)[0], batch)

    def _load(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        def of_part(part: Batch) -> tuple[jax.Array, jax.Array]:
            _, routing = self.model(params).with_routing(*part.inputs)
            loads, dropped = zip(*((stats.load, stats.dropped) for stats in routing), strict=True)
            return jnp.stack(loads), jnp.stack(dropped)

        return jax.tree.map(lambda parts: parts.mean(0), jax.lax.map(of_part, batch))

    def _state_bytes(self, params: Params, length: int) -> int | None:
        try:
            state = jax.eval_shape(lambda params: self.model(params).init_state(1, length), params)
        except NotImplementedError:
            return None
        return _total(state, lambda leaf: leaf.size * np.dtype(leaf.dtype).itemsize)


def arguments_of(options: "Options", schedule: Schedule, task: Task) -> tuple[Any, ...]:
    """Returns the arguments of `Programs` after the first, by the options of an experiment."""
    optimiser = make_optimiser(
        options.optimiser, schedule.steps, options.warmup, options.clip, options.weight_decay
    )
    devices = Devices(checks.mesh_sizes(options.mesh) if options.mesh else None)
    computation = options.precision, options.redraw, devices, options.with_costs
    return optimiser, schedule, task, *computation


def _nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy of each target, 0 where there is none."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    nats = optax.softmax_cross_entropy_with_integer_labels(wide, jnp.maximum(targets, 0))
    return jnp.where(targets != NOTHING, nats, 0)


def _of_experts(stats: RoutingStats) -> jax.Array:
    """The losses of the experts of a layer."""
    return LOAD_BALANCING * stats.load_balancing_loss + ROUTER_Z * stats.router_z_loss


_GROUPS: tuple[Any, ...] = (nnx.Param, Centroids, ...)


def _params_of(model: nnx.Module | nnx.State) -> Params:
    state = model if isinstance(model, nnx.State) else nnx.state(model)
    groups = nnx.split_state(state, *_GROUPS)
    return dict(zip(("trained", "moved", "fixed"), map(nnx.to_pure_dict, groups), strict=True))


def _total(tree: Any, measure: Callable[[Any], int]) -> int:
    return sum(measure(leaf) for leaf in jax.tree.leaves(tree))


def in_parts(batch: Batch, size: int) -> Batch:
    """Returns the batch as `(n, size, ...)`; the last part is filled up with the first examples."""

    def parts(x: np.ndarray) -> np.ndarray:
        count = len(x)
        filled = np.take(x, np.arange(count + -count % size), axis=0, mode="wrap")
        return filled.reshape(-1, size, *x.shape[1:])

    return jax.tree.map(parts, batch)
