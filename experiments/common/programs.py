"""Compiled programs of one model: initialisation, training step and evaluation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from effattn.nn import Centroids
from experiments.common.data import Data
from experiments.common.objectives import NOTHING, Examples
from experiments.common.schedules import Schedule

# Arrays of a model: "trained" parameters, and "moved" centroids, which training steps update.
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Programs:
    """Compiled programs of one model, for any seed and learning rate.

    Attributes:
      init: `seed () int -> (params, optimiser_state)`.
      step: `(params, optimiser_state, learning_rate (), examples (A, B, T)) -> (params,
        optimiser_state, loss)`. Gradients are averaged over the A microbatches. The program reuses
        the memory of `params` and `optimiser_state`.
      evaluate: `(params, examples (n, B, T)) -> (n, B)`, the nats of each example's targets.
      model: `params -> module`.
      parameters: number of trained parameters.
      temporary_bytes: memory of the compiled step without arguments and results.
      state_bytes: size of one row's decode state at the context length; None if the model does not
        decode.
    """

    init: Callable[..., tuple[Params, Any]]
    step: Callable[..., tuple[Params, Any, jax.Array]]
    evaluate: Callable[..., jax.Array]
    model: Callable[[Params], Any]
    parameters: int
    temporary_bytes: int
    state_bytes: int | None


def compile_programs(
    build: Callable[[nnx.Rngs], nnx.Module],
    optimiser: optax.GradientTransformation,
    schedule: Schedule,
    data: Data,
) -> Programs:
    """Compiles the programs of a language model.

    Args:
      build: builds a model from tokens `(B, T)` to logits `(B, T, V)`, with `init_state` if causal,
        and with `update_centroids` if the model has centroids.
      optimiser: optimiser for a peak learning rate of 1.
      schedule: number and size of the training steps.
      data: windows, validation examples and the objective.
    """

    def split(model: nnx.Module) -> Any:
        """Returns the graph, the trained parameters, the centroids and all other variables."""
        return nnx.split(model, nnx.Param, Centroids, ...)

    def params_of(model: nnx.Module) -> Params:
        _, trained, moved, _ = split(model)
        return {"trained": nnx.to_pure_dict(trained), "moved": nnx.to_pure_dict(moved)}

    graph, *_ = split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
    # All other variables, such as random features, are the same for all seeds.
    fixed = jax.jit(lambda: split(build(nnx.Rngs(0)))[3])()

    def model(params: Params) -> Any:
        return nnx.merge(graph, params["trained"], params["moved"], fixed)

    def init(seed: jax.Array) -> tuple[Params, Any]:
        params = params_of(build(nnx.Rngs(jax.random.key(seed))))
        return params, optimiser.init(params["trained"])

    def nats(params: Params, examples: Examples) -> jax.Array:
        logits = model(params)(examples.inputs)
        targets = jnp.maximum(examples.targets, 0)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.where(examples.targets == NOTHING, 0, each)

    def mean_nats(params: Params, examples: Examples) -> jax.Array:
        return nats(params, examples).sum() / (examples.targets != NOTHING).sum()

    def step(params: Params, optimiser_state: Any, learning_rate: jax.Array, examples: Examples):
        trained = params["trained"]

        def mean_of(trained, microbatch):
            return mean_nats({**params, "trained": trained}, microbatch)

        def add(total, microbatch):
            new = jax.value_and_grad(mean_of)(trained, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained))
        total, _ = jax.lax.scan(add, zero, examples)
        loss, gradients = jax.tree.map(lambda x: x / len(examples.inputs), total)
        updates, optimiser_state = optimiser.update(gradients, optimiser_state, trained)
        updates = jax.tree.map(lambda update: learning_rate * update, updates)
        params = {**params, "trained": optax.apply_updates(trained, updates)}
        return move(params, examples.inputs), optimiser_state, loss

    def move(params: Params, inputs: jax.Array) -> Params:
        if not params["moved"]:
            return params
        moving = model(params)
        moving.update_centroids(inputs.reshape(-1, inputs.shape[-1]))
        return {**params, "moved": params_of(moving)["moved"]}

    def evaluate(params: Params, examples: Examples) -> jax.Array:
        return jax.lax.map(lambda batch: nats(params, batch).sum(-1), examples)

    compiled_init = jax.jit(init)
    params, optimiser_state = jax.eval_shape(init, 0)
    batch, context = schedule.batch // schedule.accumulate, data.train.context
    tokens = jax.ShapeDtypeStruct((schedule.accumulate, batch, context), jnp.int32)
    examples = Examples(tokens, tokens)
    compiled_step = (
        jax.jit(step, donate_argnums=(0, 1)).lower(params, optimiser_state, 0.0, examples).compile()
    )
    compiled_evaluate = jax.jit(evaluate).lower(params, data.valid_batches(batch)[0]).compile()
    # The first call of a compiled program is slower, and is not part of the training time.
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), examples)
    jax.block_until_ready(compiled_step(*compiled_init(0), 0.0, zeros))
    memory = compiled_step.memory_analysis()
    assert memory is not None  # CPUs, GPUs and TPUs report it
    is_causal = data.objective.is_causal
    return Programs(
        init=compiled_init,
        step=compiled_step,
        evaluate=compiled_evaluate,
        model=model,
        parameters=_total(params["trained"], lambda leaf: leaf.size),
        temporary_bytes=memory.temp_size_in_bytes,
        state_bytes=_state_bytes(model, params, context) if is_causal else None,
    )


def _state_bytes(model: Callable[[Params], Any], params: Params, context: int) -> int | None:
    try:
        state = jax.eval_shape(lambda params: model(params).init_state(1, context), params)
    except NotImplementedError:
        return None
    return _total(state, lambda leaf: leaf.size * np.dtype(leaf.dtype).itemsize)


def _total(tree: Any, measure: Callable[[Any], int]) -> int:
    return sum(measure(leaf) for leaf in jax.tree.leaves(tree))
