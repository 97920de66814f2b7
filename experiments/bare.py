"""A complete trainer in one file, to read in one sitting: a task, a model, a loop, a table.

    python -m experiments.bare lstm --steps 600
    python -m experiments.bare delta_net allow_negative_eigenvalues=True --steps 200 --rate 0.01
    python -m experiments.bare softmax --task S3 --batch 256

The model is a causal Transformer whose attention is replaced by the mechanism. It learns a task
from batches that are generated as it trains, and is tested on held-out examples, for most tasks
also on longer ones.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from effattn.nn import TransformerConfig, TransformerLM
from experiments.harness import naming
from experiments.tasks import arithmetic, chess_games, parity, permutations, recall
from experiments.tasks.task import NOTHING, Batch, Scores, Task

TASKS: dict[str, Any] = parity.TASKS | arithmetic.TASKS | permutations.TASKS
TASKS |= chess_games.TASKS | recall.TASKS


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("mechanism", help="name in the registry of effattn, such as softmax")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the mechanism")
    parser.add_argument("--task", choices=TASKS, default="parity")
    parser.add_argument("--sizes", choices=("small", "published"), default="small")
    numbers = (
        ("layers", 2, 1, "layers of the model"),
        ("width", 64, 1, "features per token"),
        ("heads", 4, 1, "heads per layer"),
        ("batch", 64, 1, "examples per step"),
        ("steps", 1000, 1, "steps of training"),
        ("rate", 3e-3, 0, "largest learning rate"),
        ("decay", 0.01, 0, "weight decay"),
        ("seed", 0, 0, "seed of the parameters and of the examples"),
    )
    for name, default, _, unit in numbers:
        described = f"{unit}; default {default}"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=described)
    config = parser.parse_args(argv)
    for name, _, least, _ in numbers:
        if not least <= getattr(config, name) < np.inf:
            parser.error(f"--{name} must be at least {least}, got {getattr(config, name)}")
    return config


def build(config: argparse.Namespace, task: Task) -> TransformerLM:
    """Returns an untrained model; raises `ValueError` for an unknown mechanism or option."""
    name, options = naming.options_of(",".join([config.mechanism, *config.options]))
    architecture = TransformerConfig(
        vocab_size=task.vocab_size,
        num_layers=config.layers,
        features=config.width,
        num_heads=config.heads,
        mixer={"name": name, **options},
        max_length=task.length,
    )
    return TransformerLM(architecture, rngs=nnx.Rngs(config.seed))


def score(model: TransformerLM, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the nats of each target, and whether the likeliest class is the target."""
    logits = model(*batch.inputs)
    counts = batch.targets != NOTHING
    labels = jnp.where(counts, batch.targets, 0)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.where(counts, nats, 0), (logits.argmax(-1) == labels) & counts


def train(config: argparse.Namespace, task: Task, model: TransformerLM) -> TransformerLM:
    """Returns the trained model; prints the loss now and then."""
    warmup = max(1, config.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0, config.rate, warmup, max(config.steps, 2))
    adam = optax.adamw(rate, b2=0.99, weight_decay=config.decay)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), adam)
    graph, parameters, *rest = nnx.split(model, nnx.Param, ...)
    moments = optimiser.init(parameters)

    def loss_of(parameters: Any, batch: Batch) -> jax.Array:
        nats, _ = score(nnx.merge(graph, parameters, *rest), batch)
        return nats.sum() / (batch.targets != NOTHING).sum()

    @jax.jit
    def step(parameters: Any, moments: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, moments = optimiser.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, loss

    start = time.perf_counter()
    for number in range(config.steps):
        batch = task.training(config.batch, config.seed, number)
        parameters, moments, loss = step(parameters, moments, batch)
        if (number + 1) % max(1, config.steps // 10) == 0:
            seconds = time.perf_counter() - start
            print(f"step {number + 1:6d}   loss {loss:.4f}   {seconds:.0f} s", flush=True)
    return nnx.merge(graph, parameters, *rest)


def evaluate(task: Task, model: TransformerLM, size: int) -> dict[str, dict[str, Any]]:
    """Returns the measures of a model on each held-out set; longer examples in smaller batches."""
    graph, state = nnx.split(model)
    scored = jax.jit(lambda batch: score(nnx.merge(graph, state), batch))
    measures = {}
    for name, batch in task.held_out().items():
        (inputs,), targets = batch
        n = max(1, size * task.trained_length // targets.shape[1])
        starts = range(0, len(targets), n)
        parts = [scored(Batch((inputs[i : i + n],), targets[i : i + n])) for i in starts]
        nats, right = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        measures[name] = task.measure(name, batch, Scores(nats, right))
    return measures


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a model, prints its measures, and returns the exit status."""
    config = parse(argv)
    task = TASKS[config.task][config.sizes]
    try:
        model = build(config, task)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    model = train(config, task, model)
    rows = evaluate(task, model, config.batch)
    columns = list(next(iter(rows.values())))
    print(f"\n{config.mechanism}, {config.task}")
    print(f"{'':20}" + "".join(f"{name:>18}" for name in columns))
    for name, measures in rows.items():
        print(f"{name:20}" + "".join(f"{value:18.4f}" for value in measures.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
