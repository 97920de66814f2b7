"""Pipeline parallelism: each device of a mesh axis has one stage of a model."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks, mesh_axes

Stage = Callable[[Any, Any], Any]
Loss = Callable[[Any, Any, Any], jax.Array]
SCHEDULES = "1f1b", "gpipe"


def pipeline(
    stage: Stage,
    loss: Loss,
    axis_name: str,
    schedule: str = "1f1b",
    *,
    lockstep: bool = False,
) -> Callable[[Any, Any, Any, Any], jax.Array]:
    """Returns the mean loss of a model whose stages the devices of a mesh axis hold.

    Call the result inside `jax.shard_map`, as `run(params, head, inputs, targets)`. The first three
    arguments have gradients. With S devices and M microbatches, a microbatch passes the devices in
    S steps, and another one starts with each step. Devices wait for (S - 1) / (M + S - 1) of the
    time (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
    section 2.2). In each step a device sends one activation to the next device, and one gradient to
    the one before.

    Both schedules take the same time, except with `lockstep`, and recompute each stage for its
    gradients. Every device has the `inputs` and, backward, their gradients. The schedules differ in
    the number of further stage inputs that a device stores:

    - "gpipe": M + S - 1 (Huang et al. 2019, "GPipe"); all gradients follow the last loss.
    - "1f1b": 2 S - 1, for any number of microbatches. The gradients of a microbatch follow its
      loss, between the stages of later microbatches (Narayanan et al. 2019, "PipeDream"). They are
      computed in any case; for the loss alone, "gpipe" takes less time.

    Args:
      stage: `(params, x) -> y`, one stage; y has the structure, shapes and dtypes of x. Arrays that
        `stage` and `loss` close over are constants, without gradients.
      loss: `(head, y, target) -> ()`, of the last stage's result, such as its output projection and
        cross-entropy.
      axis_name: the mesh axis of the stages.
      schedule: "1f1b" or "gpipe".
      lockstep: whether devices call `stage` and `loss` in every step, and discard results that are
        not due. Otherwise they wait. Lockstep is needed if these functions exchange data with
        devices of other mesh axes: a collective permutation may wait for all devices of the
        program. With it, "1f1b" takes M + 2 S - 2 steps forward and backward, and "gpipe"
        M + S - 1.

    Returns:
      A function of `params`, those of this device's stage; `head`, the parameters of the loss;
      `inputs`, arrays `(M, ...)` that enter the first stage; `targets`, arrays `(M, ...)` without
      gradients. The last three are equal on all devices. It returns the mean of the M losses, equal
      on all devices. The gradients of `params` are those of this device's stage; those of `head`
      and `inputs` are equal on all devices.

    Raises:
      ValueError: an unknown schedule; on call, different numbers of microbatches, or a stage that
        changes its input's shapes.
    """
    checks.one_of("schedule", schedule, SCHEDULES)

    def run(params, head, inputs, targets):
        mesh_axes.check_axis(axis_name)
        count = _count(inputs, targets)
        number = lax.axis_index(axis_name)
        # Arrays that devices share vary in here, so that their gradients are summed outside.
        arrays = _vary((params, head, inputs, targets, number))
        params, head, inputs, targets, number = arrays
        _check(stage, params, inputs)
        line = _Line(stage, loss, axis_name, number, count, inputs, lockstep)
        of = _gpipe if schedule == "gpipe" else _one_forward_one_backward
        return lax.psum(of(line, params, head, inputs, targets), axis_name) / count

    return run


class _Line:
    """The stages of a pipeline, seen from one device.

    Attributes:
      stages: S, number of devices.
      number: index of this device's stage.
      count: M, number of microbatches.
      is_first: whether this is the first stage.
      is_last: whether this is the last stage.
      dtype: dtype of losses, at least float32.
    """

    def __init__(self, stage, loss, axis_name, number, count, inputs, lockstep):
        self.stage, self.loss, self._axis_name = stage, loss, axis_name
        self._lockstep = lockstep
        self.stages, self.number, self.count = lax.axis_size(axis_name), number, count
        self.is_first, self.is_last = number == 0, number == self.stages - 1
        self.dtype = jnp.promote_types(jnp.result_type(*jax.tree.leaves(inputs)), jnp.float32)

    def send(self, tree, step):
        """Passes arrays to the next stage (`step=1`) or to the one before (-1)."""
        hops = [(at, at + step) for at in range(self.stages) if 0 <= at + step < self.stages]
        return jax.tree.map(lambda x: lax.ppermute(x, self._axis_name, hops), tree)

    def either(self, condition, function, otherwise, *arrays):
        """`function(*arrays)` if the condition holds, and `otherwise(*arrays)` if not."""
        if self._lockstep:
            return _where(condition, function(*arrays), otherwise(*arrays))
        return lax.cond(condition, function, otherwise, *arrays)

    def is_due(self, microbatch):
        return (0 <= microbatch) & (microbatch < self.count)

    def loss_of(self, head, y, target):
        return self.loss(head, y, target).astype(self.dtype)


def _gpipe(line, params, head, inputs, targets):
    """The sum of the losses on the last device, 0 on the others; gradients by JAX."""
    no_loss, _ = mesh_axes.vary_alike((jnp.zeros((), line.dtype), line.number))
    x, target = (jax.tree.map(lambda x: x[0], each) for each in (inputs, targets))
    stage = _with_constants(line.stage, params, x)
    loss_of = _with_constants(line.loss_of, head, x, target)

    @jax.checkpoint
    def step(params, head, x, target, is_due):
        y = line.either(is_due, stage, lambda _, x: x, params, x)
        ends = is_due & line.is_last
        return y, line.either(ends, loss_of, lambda *_: no_loss, head, y, target)

    def tick(x, at):
        microbatch = at - line.number
        x = _where(line.is_first, _pick(inputs, microbatch), x)
        y, found = step(params, head, x, _pick(targets, microbatch), line.is_due(microbatch))
        return line.send(y, 1), found

    # No zeros: in lockstep, idle devices compute too, and 0 times a gradient that is NaN is NaN.
    start = jax.tree.map(lambda x: x[0], inputs)
    return lax.scan(tick, start, jnp.arange(line.count + line.stages - 1))[1].sum()


def _with_constants(function, *arguments):
    """The function of such arguments, without gradients of arrays that it closes over.

    Devices would sum these gradients where only some of them call the function, and wait for ever.
    """
    converted, arrays = jax.closure_convert(function, *arguments)
    arrays = lax.stop_gradient(arrays)
    return lambda *arguments: converted(*arguments, *arrays)


def _one_forward_one_backward(line, params, head, inputs, targets):
    """As `_gpipe`, but the gradients are computed with the losses."""
    arrays = params, head, inputs
    value, gradients = _with_gradients(line, *lax.stop_gradient(arrays), targets)
    # Arrays that the functions close over are constants: JAX would differentiate the loop above.
    return _attached(*lax.stop_gradient((value, gradients)), arrays)


@jax.custom_vjp
def _attached(value, gradients, arrays):
    """The value, as a function of arrays with these gradients.

    It closes over nothing, because JAX may trace the rule below after the call.
    """
    return value


def _forward(value, gradients, arrays):
    return value, gradients


def _backward(gradients, d_value):
    return None, None, jax.tree.map(lambda x: (x * d_value).astype(x.dtype), gradients)


_attached.defvjp(_forward, _backward)


def _with_gradients(line, params, head, inputs, targets):
    """The sum of the losses, and its gradients by `params`, `head` and `inputs`.

    Stage s runs microbatch m forward in step s + m, and backward in step 2 (S - 1) - s + m. The
    last stage does both at once.
    """
    slots = 2 * line.stages - 1

    def forward(carry, at):
        stored, x = carry
        microbatch = at - line.number
        x = _where(line.is_first, _pick(inputs, microbatch), x)
        is_due = line.is_due(microbatch)
        stored = _where(is_due, _put(stored, x, microbatch % slots), stored)
        runs = is_due & ~line.is_last
        return stored, line.either(runs, line.stage, lambda _, x: x, params, x)

    def backward(carry, at):
        stored, d_y, total, sums, d_inputs = carry
        microbatch = at - 2 * (line.stages - 1) + line.number
        x, target = _pick(stored, microbatch % slots), _pick(targets, microbatch)

        def of_loss(y, _):
            value, (d_head, d_y) = jax.value_and_grad(line.loss_of, (0, 1))(head, y, target)
            return value, d_head, d_y

        def no_loss(_, d_y):
            return *jax.tree.map(jnp.zeros_like, (total, head)), d_y

        def active(d_y):
            y, pull_back = jax.vjp(line.stage, params, x)
            value, d_head, d_y = line.either(line.is_last, of_loss, no_loss, y, d_y)
            d_params, d_x = pull_back(d_y)
            return value, (d_params, d_head, d_x)

        def idle(_):
            return jax.tree.map(jnp.zeros_like, (total, (params, head, x)))

        is_due = line.is_due(microbatch)
        value, (*found, d_x) = line.either(is_due, active, idle, d_y)
        sums = jax.tree.map(lambda old, new: old + new.astype(old.dtype), sums, tuple(found))
        is_put = is_due & line.is_first
        d_inputs = _where(is_put, _put(d_inputs, d_x, microbatch), d_inputs)
        return total + value, sums, d_inputs, d_x

    def tick(carry, at):
        stored, x, d_y, total, sums, d_inputs = carry
        stored, y = forward((stored, x), at)
        total, sums, d_inputs, d_x = backward((stored, d_y, total, sums, d_inputs), at)
        return (stored, line.send(y, 1), line.send(d_x, -1), total, sums, d_inputs), None

    first = jax.tree.map(lambda x: x[0], inputs)
    stored = jax.tree.map(lambda x: jnp.broadcast_to(x, (slots, *x.shape)), first)
    sums = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), (params, head)
    )
    start = (
        stored,
        first,
        jax.tree.map(jnp.zeros_like, first),
        jnp.zeros((), line.dtype),
        sums,
        jax.tree.map(jnp.zeros_like, inputs),
    )
    start = mesh_axes.vary_alike((start, line.number))[0]
    steps = jnp.arange(line.count + 2 * (line.stages - 1))
    (*_, total, sums, d_inputs), _ = lax.scan(tick, start, steps)
    gradients = jax.tree.map(lambda x, d_x: d_x.astype(x.dtype), (params, head), sums)
    return total, (*gradients, d_inputs)


def _vary(arrays):
    """`mesh_axes.vary_alike`, with gradients of 16 bits summed in float32.

    XLA for CPUs fails to compile sums in bfloat16 where some mesh axes are automatic.
    """

    def wide(x):
        is_short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
        return x.astype(jnp.float32) if is_short else x

    def back(x, like):
        return x if x.dtype == like.dtype else x.astype(like.dtype)

    return jax.tree.map(back, mesh_axes.vary_alike(jax.tree.map(wide, arrays)), arrays)


def _count(inputs, targets):
    counts = {x.shape[0] if x.ndim else None for x in jax.tree.leaves((inputs, targets))}
    if len(counts) != 1 or counts & {None, 0}:
        raise ValueError(
            "the first axis of inputs and targets must be that of the microbatches, got the "
            f"lengths {', '.join(map(str, sorted(counts, key=str)))}"
        )
    return counts.pop()


def _check(stage, params, inputs):
    x = jax.tree.map(lambda x: x[0], inputs)
    given, found = (_types(tree) for tree in (x, jax.eval_shape(stage, params, x)))
    if given != found:
        raise ValueError(
            f"stage must return the shapes and dtypes of its input, {given}, got {found}"
        )


def _types(tree):
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


def _pick(tree, at):
    """The entry `at` of each array, between the first and the last."""

    def pick(x):
        return lax.dynamic_index_in_dim(x, jnp.clip(at, 0, len(x) - 1), 0, keepdims=False)

    return jax.tree.map(pick, tree)


def _put(tree, entry, at):
    """The arrays with another entry `at`."""

    def put(x, y):
        return lax.dynamic_update_index_in_dim(x, y, jnp.clip(at, 0, len(x) - 1), 0)

    return jax.tree.map(put, tree, entry)


def _where(condition, yes, no):
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)
