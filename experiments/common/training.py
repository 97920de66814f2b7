"""Training of one model, with checkpoints, resumption and a check for divergence."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common.checkpoints import Checkpoints
from experiments.common.data import Data, batches
from experiments.common.errors import Diverged
from experiments.common.metrics import Metrics
from experiments.common.objectives import Examples
from experiments.common.programs import Params, Programs
from experiments.common.progress import Progress
from experiments.common.schedules import Schedule

# Longer runs log the loss of evenly spaced steps.
MAX_LOGGED_LOSSES = 1000


@dataclasses.dataclass(frozen=True)
class Run:
    """Training run of one model.

    Attributes:
      name: name in progress lines and errors.
      folder: folder of checkpoints and metrics.
      identity: text that identifies everything the parameters depend on.
      seed: seed of the initial parameters, the order of the data and the masks.
      learning_rate: peak learning rate.
    """

    name: str
    folder: Path
    identity: str
    seed: int
    learning_rate: float


def train(
    run: Run, schedule: Schedule, programs: Programs, data: Data, progress: Progress
) -> tuple[Params, dict[str, Any]]:
    """Trains a model from the last checkpoint, or from the start.

    The loss of a step is read while the next step runs, so that the device never waits for the
    host.

    Returns:
      `(params, record)`: the final parameters, and the record of the last evaluation.

    Raises:
      Diverged: the loss became NaN or infinite; the checkpoint of the last evaluation is kept.
      Stopped: `progress.stop` was called.
    """
    params, optimiser_state = programs.init(run.seed)
    order = batches(data.train, schedule.batch, run.seed)
    tokens_per_step = schedule.batch * data.train.context
    valid, valid_count = data.valid_batches(schedule.batch // schedule.accumulate)
    log_every = math.ceil(schedule.steps / MAX_LOGGED_LOSSES)
    step, seconds = 0, 0.0
    record: dict[str, Any] = {}
    unread: list[tuple[int, jax.Array]] = []

    def diverged(step: int) -> Diverged:
        kept = "no checkpoint had been written yet"
        if checkpoints.latest is not None:
            kept = f"the checkpoint of step {checkpoints.latest} is kept"
        advice = "try a lower --learning-rate, more --warmup or a lower --clip"
        return Diverged(run.name, step, f"{kept}; {advice}")

    def log(step: int, loss: jax.Array) -> None:
        train_loss = float(loss)
        if not math.isfinite(train_loss):
            raise diverged(step)
        tokens, elapsed = step * tokens_per_step, time.perf_counter() - started
        shown.step(step, train_loss, tokens / elapsed)
        if step % log_every == 0:
            at = {"step": step, "tokens": tokens, "seconds": elapsed}
            metrics.write({**at, "train_loss": train_loss})

    with Checkpoints(run.folder / "checkpoints", run.identity) as checkpoints:
        if checkpoints.latest is not None:
            (params, optimiser_state), at = checkpoints.restore(
                (params, optimiser_state), ("record", "order")
            )
            step, record = checkpoints.latest, at["record"]
            seconds = record["seconds"]
            order.set_state(at["order"])
        with (
            progress.begin(run.name, step) as shown,
            Metrics(run.folder / "metrics.jsonl", step) as metrics,
        ):
            while step < schedule.steps:
                until = min(
                    step - step % schedule.evaluate_every + schedule.evaluate_every, schedule.steps
                )
                # Evaluations and checkpoints do not count as training time.
                started = time.perf_counter() - seconds
                while step < until:
                    examples = data.objective.training(next(order), run.seed, step)
                    parts = (schedule.accumulate, -1, data.train.context)
                    params, optimiser_state, loss = programs.step(
                        params,
                        optimiser_state,
                        run.learning_rate,
                        Examples(*(array.reshape(parts) for array in examples)),
                    )
                    step += 1
                    unread.append((step, loss))
                    if len(unread) > 1:
                        log(*unread.pop(0))
                log(*unread.pop())
                seconds = time.perf_counter() - started

                each = np.asarray(programs.evaluate(params, valid), np.float64)
                nats = each.ravel()[:valid_count].sum()
                # Parameters that diverged must not replace the last good checkpoint.
                if not math.isfinite(nats):
                    raise diverged(step)
                record = {
                    "step": step,
                    "tokens": step * tokens_per_step,
                    "seconds": seconds,
                    "valid_loss": nats / data.valid_tokens,
                    "bits_per_byte": nats / math.log(2) / data.valid_bytes,
                }
                metrics.write(record)
                metrics.flush()
                state = {"record": record, "order": order.get_state()}
                checkpoints.save(step, (params, optimiser_state), state)
                shown.evaluated(record)
    return params, record
