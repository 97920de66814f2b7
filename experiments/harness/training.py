"""Training of one model, with checkpoints, resumption and a check for divergence."""

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import processes
from experiments.harness.checkpoints import Checkpoints
from experiments.harness.errors import Diverged, Stopped
from experiments.harness.metrics import Metrics
from experiments.harness.programs import Params, Programs, in_parts
from experiments.harness.progress import Progress
from experiments.harness.schedules import Schedule
from experiments.tasks.task import Batch, Scores, Task


@dataclasses.dataclass(frozen=True)
class Run:
    """Training run of one model.

    Attributes:
      name: name in progress lines and errors.
      folder: folder of checkpoints and metrics.
      identity: text that identifies everything the parameters depend on.
      seed: seed of the initial parameters and of the training examples.
      learning_rate: peak learning rate.
    """

    name: str
    folder: Path
    identity: str
    seed: int
    learning_rate: float


def train(
    run: Run, schedule: Schedule, programs: Programs, task: Task, progress: Progress
) -> tuple[Params, dict[str, Any]]:
    """Trains a model from the last whole checkpoint, or from the start.

    The examples of a step depend only on the seed and the step, so a checkpoint needs no other
    state of the data. The loss of a step is read while the next step runs, and checkpoints are
    written meanwhile, so that the device never waits for the host.

    Returns:
      `(params, record)`: the final parameters, and the record of the last evaluation, on the
      validation set of the task.

    Raises:
      Diverged: the loss became NaN or infinite; the checkpoint of the last evaluation is kept.
      Stopped: `progress.stop` was called; a checkpoint of the present step is written before.
      UserError: a checkpoint or the metrics cannot be read or written.
    """
    params, optimiser_state = programs.init(run.seed)
    name, validation = next(iter(task.held_out().items()))
    step = saved = tokens = temporary_bytes = 0
    seconds = 0.0
    record: dict[str, Any] = {}
    unread: list[tuple[int, int, jax.Array]] = []

    def diverged(step: int) -> Diverged:
        kept = "no checkpoint had been written yet"
        if checkpoints.latest is not None:
            kept = f"the checkpoint of step {checkpoints.latest} is kept"
        advice = "try a lower --learning-rate, more --warmup or a lower --clip"
        return Diverged(run.name, step, f"{kept}; {advice}")

    def log(count: int) -> None:
        """Reads the losses of steps, all but the last `count`."""
        while len(unread) > count:
            step, tokens, loss = unread.pop(0)
            train_loss = float(loss)
            if not math.isfinite(train_loss):
                raise diverged(step)
            elapsed = time.perf_counter() - started
            shown.step(step, train_loss, tokens / elapsed)
            if schedule.logs_at(step):
                at = {"step": step, "tokens": tokens, "seconds": elapsed}
                metrics.write({**at, "train_loss": train_loss})

    def so_far() -> dict[str, Any]:
        largest = max(temporary_bytes, programs.step.temporary_bytes)
        return {"tokens": tokens, "seconds": seconds, "temporary_bytes": largest}

    def save() -> None:
        metrics.flush()
        checkpoints.save(step, (params, optimiser_state), {**so_far(), "record": record})

    with Checkpoints(run.folder / "checkpoints", run.identity) as checkpoints:
        found = checkpoints.restore((params, optimiser_state), progress.warn)
        if found is not None:
            step, (params, optimiser_state), at = found
            saved, record, tokens, seconds = step, at["record"], at["tokens"], at["seconds"]
            temporary_bytes = at["temporary_bytes"]
        processes.check_same_run(run.identity, step)
        with (
            progress.begin(run.name, step) as shown,
            Metrics(run.folder / "metrics.jsonl", schedule, step) as metrics,
        ):
            # Evaluations, checkpoints and compilation do not count as training time.
            started = time.perf_counter() - seconds
            while step < schedule.steps:
                if progress.stopping or processes.stops_now():
                    log(0)
                    seconds = time.perf_counter() - started
                    # Parameters that diverged must not replace the last good checkpoint.
                    if step > saved and _all_finite(params):
                        save()
                        checkpoints.wait()
                    raise Stopped
                batch = task.training(schedule.batch, run.seed, step)
                tokens += batch.inputs[0].size
                batch = in_parts(batch, schedule.batch // schedule.accumulate)
                if programs.redraw and step and step % programs.redraw == 0:
                    params = programs.draw(params, np.int32(step // programs.redraw))
                arguments = (params, optimiser_state, np.float32(run.learning_rate), batch)
                if not programs.step.knows(batch):
                    log(0)
                    paused = time.perf_counter()
                    programs.step.warm_up(*arguments)
                    if programs.redraw:
                        programs.draw.warm_up(params, np.int32(0))
                    started += time.perf_counter() - paused
                params, optimiser_state, loss = programs.step(*arguments)
                step += 1
                unread.append((step, tokens, loss))
                log(1)
                if not schedule.evaluates_at(step):
                    continue
                log(0)
                seconds = time.perf_counter() - started
                scores = evaluate(programs, params, validation, schedule, validation)
                if not math.isfinite(scores.nats.sum()):
                    raise diverged(step)
                record = {
                    "step": step,
                    **so_far(),
                    **task.measure(name, validation, scores),
                    **expert_loads(programs, params, validation, schedule),
                }
                metrics.write(record)
                save()
                saved = step
                shown.evaluated(task.headline, record)
                started = time.perf_counter() - seconds
    return params, record


def _all_finite(params: Params) -> bool:
    leaves = jax.tree.leaves(params)
    return all(
        jnp.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def evaluate(
    programs: Programs, params: Params, batch: Batch, schedule: Schedule, validation: Batch
) -> Scores:
    """Returns the scores of all examples of a batch.

    Parts of the validation set are as large as a microbatch of the training; parts of longer
    examples have as many tokens.
    """
    size = schedule.batch // schedule.accumulate
    of_validation, of_batch = (np.shape(b.inputs[0])[1] for b in (validation, batch))
    parts = in_parts(batch, max(1, min(size, size * of_validation // of_batch)))
    count = len(batch.targets)

    def whole(scores: jax.Array) -> np.ndarray:
        x = np.asarray(scores)
        return x.reshape(-1, *x.shape[2:])[:count]

    return jax.tree.map(whole, programs.evaluate(params, parts))


def expert_loads(
    programs: Programs, params: Params, batch: Batch, schedule: Schedule
) -> dict[str, Any]:
    """Returns the load of each layer's experts on a batch's microbatches; nothing without experts.

    Returns:
      "expert_load", `(L, E)`, the share of the choices that fall on each expert; and
      "expert_dropped", `(L,)`, the share of the choices that a capacity leaves out.
    """
    if not programs.has_experts:
        return {}
    # Whole microbatches only: examples that fill up the last one would count twice.
    count = len(batch.targets)
    size = min(schedule.batch // schedule.accumulate, count)
    whole = jax.tree.map(lambda x: x[: count - count % size], batch)
    loads = programs.load(params, in_parts(whole, size))
    load, dropped = (np.asarray(each, float).tolist() for each in loads)
    return {"expert_load": load, "expert_dropped": dropped}


def held_out(
    programs: Programs, params: Params, task: Task, schedule: Schedule
) -> Mapping[str, dict[str, Any]]:
    """Returns the measures of every held-out set, by its name."""
    sets = task.held_out()
    validation = next(iter(sets.values()))
    return {
        name: task.measure(name, batch, evaluate(programs, params, batch, schedule, validation))
        for name, batch in sets.items()
    }
