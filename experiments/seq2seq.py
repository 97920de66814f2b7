"""Comparison of encoder-decoders that differ only in the mechanism of the encoder.

`python -m experiments.seq2seq` compares three encoders in minutes on two cores; `--help` lists the
options. All decoders have causal softmax attention, and cross-attention to the encoder's output.
"""

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as `python experiments/seq2seq.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from experiments.common import checks, folders, machine, outcome, pairs, report, user_modules
from experiments.common.errors import UserError
from experiments.common.metrics import read_json, write_atomically

COMPARED = ("softmax", "sliding_window", "linear")
SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a small encoder-decoder for each mechanism on pairs of texts and compares them.

    Tokens are bytes. Token accuracy is the accuracy of the next byte, given the bytes before it. A
    match is exact if the model, given the source alone, writes the whole target and its end. A
    stopped run resumes with the next model when the same command is given again. A finished run
    prints its table.
    """

    task: str = "reverse"  # sort, reverse, dates, or a file of lines SOURCE, tab, TARGET
    encoders: tuple[str, ...] = COMPARED  # NAME; NAME,OPTION=8; A/B by layer; A+B by head
    imports: user_modules.Modules = ()  # Python modules that register mechanisms of their own
    window: int = 5  # tokens in the window of sliding_window, the present token included
    layers: int = 2  # layers of the encoder, and layers of the decoder
    width: int = 64  # features per token
    heads: int = 4  # query heads, a divisor of width
    batch: int = 64  # pairs per step
    steps: int = 600  # training steps
    learning_rate: float = 0.003  # peak learning rate of AdamW
    evaluate_every: int = 150  # steps between evaluations
    seeds: tuple[int, ...] = (0,)  # seeds of parameters and order of the pairs
    examples: int = 20000  # pairs to generate, or to read from a file at most
    # Held-out pairs; from a file, at most the distinct pairs of every tenth source. All pairs of a
    # source are either trained on or held out. A repeated held-out pair is measured once.
    held_out: int = 256
    output: Path | None = None  # run folder; default runs/seq2seq-TASK-HASH, by the options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.seq2seq", args=argv)

    def work() -> None:
        user_modules.load(config.imports)
        check(config)
        data = pairs.load(config.task, config.examples, config.held_out)
        left_out = {"output"} | (set() if config.imports else {"imports"})
        given = {k: v for k, v in dataclasses.asdict(config).items() if k not in left_out}
        settings = {"experiment": "seq2seq", **given, "pairs_sha256": data.sha256}
        task = Path(config.task).stem
        name = f"seq2seq-{task}-{folders.fingerprint(settings)}"
        folder = folders.path_of(config.output, name)
        folders.check_folder(folder, settings)
        if report.finished(folder):
            print(f"This run is finished; to repeat it, delete {folder} or change --output.")
        else:
            print(f"Writing to {folder}. If stopped, the same command resumes.", flush=True)
            train_all(config, folder, data, settings)
        print((folder / "summary.md").read_text(encoding="utf-8"))
        print(
            f"In {folder}: summary.md, summary.json, accuracy.png, config.json and a file per run."
        )

    return outcome.exit_status(work, "stopped; the same command resumes with the next model")


def check(config: Config) -> None:
    """Raises `UserError` if the settings do not fit together."""
    counts = ("window", "layers", "width", "heads", "batch", "steps", "evaluate_every")
    checks.check_counts(config, *counts, "examples", "held_out")
    for name in ("encoders", "seeds"):
        values = getattr(config, name)
        if not values or len(set(values)) < len(values):
            raise UserError(f"--{name} needs one or more different values, got {values}")
    checks.check_seeds(config)
    if config.width % (2 * config.heads):
        raise UserError(
            f"--heads must divide --width {config.width} into even head sizes, got {config.heads}"
        )
    checks.check_positive(config, "learning_rate")


def train_all(config: Config, folder: Path, data: pairs.Pairs, settings: dict[str, Any]) -> None:
    """Trains every model that is not trained yet; writes table, numbers and figure."""
    # Imported late: --help and bad input need not wait for JAX and Flax.
    from experiments.common import mixers, pair_training

    sizes = pair_training.Sizes(config.layers, config.width, config.heads, config.window)
    most = data.train.source.shape[1]
    builders = {}
    for encoder in config.encoders:

        def trial(encoder: str = encoder) -> None:
            builders[encoder] = pair_training.model_of(encoder, sizes, most)
            pair_training.check(encoder, builders[encoder], most)

        checks.check_mechanism("--encoders", encoder, trial)
    with folders.claimed(folder, settings):
        runs = []
        for encoder, build in builders.items():
            for seed in config.seeds:
                name = f"{mixers.folder_name(encoder)}-seed{seed}"
                path = folder / f"{name}.json"
                if not path.is_file():
                    result = pair_training.train(
                        name,
                        build,
                        data,
                        steps=config.steps,
                        batch=config.batch,
                        learning_rate=config.learning_rate,
                        evaluate_every=config.evaluate_every,
                        seed=seed,
                        say=lambda text: print(text, flush=True),
                    )
                    written = result.pop("written")[:SHOWN]
                    result["samples"] = list(map(pairs.text_of, written))
                    result = {"encoder": encoder, "seed": seed, **result}
                    write_atomically(path, json.dumps(result, indent=2) + "\n")
                remedy = f"delete {path} to train that run again"
                runs.append(read_json(path, ("encoder", "curve", "samples"), remedy))
        draw(folder / "accuracy.png", runs)
        summary = {"config": settings, "environment": machine.environment(), "runs": runs}
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_atomically(folder / "summary.md", markdown(summary, data.held_out))


def markdown(summary: dict[str, Any], held_out: pairs.Rows) -> str:
    """Returns the Markdown report: table, method and samples."""
    config, runs = summary["config"], summary["runs"]
    rows = []
    for encoder in config["encoders"]:
        own = [run for run in runs if run["encoder"] == encoder]
        tokens, exact = (
            statistics.fmean(run[key] for run in own) for key in ("token_accuracy", "exact_match")
        )
        seconds = statistics.fmean(run["seconds"] for run in own)
        size = f"{own[0]['parameters']:,}"
        rows.append([encoder, f"{tokens:.1%}", f"{exact:.1%}", size, f"{seconds:.0f} s"])
    header = ["encoder", "tokens", "exact matches", "parameters", "training"]
    samples = []
    for index in range(min(SHOWN, len(held_out.source))):
        source, wanted = (
            pairs.text_of(tokens[index]) for tokens in (held_out.source, held_out.wanted)
        )
        first = config["seeds"][0]
        said = [[r["encoder"], r["samples"][index]] for r in runs if r["seed"] == first]
        lines = [["source", source], ["target", wanted], *said]
        width = max(len(name) for name, _ in lines)
        samples.append("\n".join(f"    {n.ljust(width)}  {t!r}" for n, t in lines))
    about = ", ".join(f"{key} {value}" for key, value in config.items())
    machine = ", ".join(f"{key} {value}" for key, value in summary["environment"].items())
    count = len(held_out.source)
    return "\n\n".join(
        [
            f"# Encoders compared: {config['task']}",
            report.markdown_table(header, rows),
            f"Means over {len(config['seeds'])} seed(s), on {count} held-out pairs. A token is "
            "right if it is the likeliest token after the tokens before it. A match is exact if "
            "the model, given the source alone, writes the target and its end.",
            "![Held-out accuracy against steps](accuracy.png)",
            "## Samples",
            *samples,
            "## Configuration",
            f"{about}.",
            f"{machine}.\n",
        ]
    )


def draw(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Draws both accuracies against steps, one line per run and one colour per encoder."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from effattn.analysis.style import COLOURS, MARKERS
    from experiments.common.figure import legend_below

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    encoders = list(dict.fromkeys(run["encoder"] for run in runs))
    for run in runs:
        index = encoders.index(run["encoder"])
        is_first = run["seed"] == runs[0]["seed"]
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "label": run["encoder"] if is_first else None,
        }
        steps = [record["step"] for record in run["curve"]]
        for axis, key in zip(axes, ("token_accuracy", "exact_match"), strict=True):
            axis.plot(steps, [100 * record[key] for record in run["curve"]], **style)
    axes[0].set(xlabel="training steps", ylabel="held-out tokens right (%)")
    axes[1].set(xlabel="training steps", ylabel="held-out pairs right (%)")
    for axis in axes:
        axis.grid(alpha=0.3)
    handles = [line for line in axes[0].get_lines() if not line.get_label().startswith("_")]
    legend_below(figure, handles, "encoder")
    partial = path.with_name(f"partial-{path.name}")
    figure.savefig(partial, dpi=150)
    plt.close(figure)
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
