"""Pictures of the documentation: patterns, mechanisms, receptive fields, attention weights, costs.

`python -m experiments.gallery` writes the pictures to `docs/images/`, or to `--output`. For the
attention weights it trains four small models, in about a minute on two cores.
"""

import dataclasses
import functools
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import tyro
from PIL import Image

if not __package__:  # run as `python experiments/gallery.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from effattn import analysis, registry
from effattn.nn import TransformerConfig, TransformerLM
from effattn.nn.binding import Binding
from effattn.patterns import (
    Axial,
    BlockMask,
    Causal,
    Custom,
    Dilated,
    Documents,
    Fixed,
    Full,
    Global,
    GlobalBlocks,
    Grid,
    Pattern,
    Prefix,
    RandomBlocks,
    SlidingWindow,
    Strided,
    bigbird,
    longformer,
    sparse_transformer,
)
from experiments.costs import figures
from experiments.harness import optimisers, outcome, programs
from experiments.harness.errors import UserError
from experiments.harness.schedules import Schedule
from experiments.tasks import corpora, tokenizers
from experiments.tasks.text import NextToken

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COSTS = ROOT / "experiments" / "results" / "efficiency-all" / "summary.json"
# Mechanisms of the picture of costs.
COMPARED = "softmax", "sliding_window", "bigbird", "linear", "gated_linear", "mamba2", "hyena"
LENGTH = 64
COLUMNS = 5
DPI = 150

CHECKERS = np.indices((8, 8)).sum(0) % 2 == 0

PATTERNS: Mapping[str, Pattern] = {
    "Full()": Full(),
    "Causal()": Causal(),
    "SlidingWindow(4, 4)": SlidingWindow(4, 4),
    "SlidingWindow(1, 1, 8)": SlidingWindow(1, 1, 8),
    "Causal() & SlidingWindow(7, 0)": Causal() & SlidingWindow(7, 0),
    "Dilated(3, dilation=4)": Dilated(3, 4),
    "Strided(8)": Strided(8),
    "Fixed(8, summary=2)": Fixed(8, 2),
    "Global((0, 1, 32))": Global((0, 1, 32)),
    "GlobalBlocks(8, 1, 1)": GlobalBlocks(8, 1, 1),
    "Prefix(16)": Prefix(16),
    "Causal() | Prefix(16)": Causal() | Prefix(16),
    "Documents((24, 16, 20))": Documents((24, 16, 20)),
    "RandomBlocks(4, per_row=3)": RandomBlocks(4, 3),
    "BlockMask(checkers, 8)": BlockMask(CHECKERS, 8),
    "Grid(8, 8, window=1)": Grid(8, 8, 1),
    "Axial(8, 8)": Axial(8, 8),
    "Custom: (i & j) == 0": Custom(lambda i, j: (i & j) == 0),
    "~SlidingWindow(7, 7)": ~SlidingWindow(7, 7),
    "longformer(4, 2)": longformer(4, 2),
    "longformer(4, 2, dilation=2)": longformer(4, 2, dilation=2),
    "bigbird(4)": bigbird(4),
    "bigbird(4, causal=True)": bigbird(4, causal=True),
    "sparse_transformer(8)": sparse_transformer(8),
    'sparse_transformer(8, "fixed")': sparse_transformer(8, "fixed"),
}

# Options that show more in a picture than `small_options`. With keys that grow with the position,
# the weights of hierarchical attention show its summaries.
RISING = np.linspace(0, 1, LENGTH, dtype=np.float32)[:, None, None] * np.ones(8, np.float32)
# Gates of a recurrence of one head, decays and write strengths of each token, and unit keys.
FORGETS = np.full((LENGTH, 1), -0.05, np.float32)
FORGETS_ALIKE = np.full((LENGTH, 1, 8), -0.05, np.float32)
WRITES = np.full((LENGTH, 1), 0.1, np.float32)
UNIT = np.full((LENGTH, 1, 8), 8**-0.5, np.float32)
SELECTS = np.random.default_rng(2).standard_normal((LENGTH, 1, 8), np.float32)
VECTORS = np.random.default_rng(0).standard_normal((1, 64, 8), np.float32)
KERNEL = np.random.default_rng(1).standard_normal((1, 8, 8), np.float32)
SHOWN: Mapping[str, Mapping[str, Any]] = {
    "longformer": {"global_mask": np.isin(np.arange(LENGTH), (0, 32)), "max_global": 2},
    "bigbird": {"block_size": 4},
    "hierarchical": {"segment_size": 4, "num_levels": 4, "num_summaries": 1, "key": RISING},
    "additive": {"query_kernel": KERNEL, "key_kernel": KERNEL, "score": 4 * KERNEL[:, 0]},
    "differential": {"lambda_": np.full((), 0.5, np.float32)},
    "forgetting": {"log_forget": FORGETS},
    "selective": {"selection_query": SELECTS, "selection_key": SELECTS[::-1]},
    "path": {"reflection": UNIT, "beta": WRITES},
    "adaptive_span": {"span": np.full(1, 8, np.float32), "max_span": 16, "ramp": 8},
    "learned_blocks": {"selection_query": SELECTS, "selection_key": SELECTS},
    "sinkhorn": {"sort_projection": VECTORS},
    "native_sparse": {"gates": np.full((LENGTH, 1, 3), 0.3, np.float32)},
    "infini": {"gate": np.zeros(1, np.float32), "segment_size": 16},
    "gated_linear": {"log_decay": FORGETS},
    "hgrn2": {"log_decay": FORGETS_ALIKE, "key": -np.expm1(FORGETS_ALIKE)},
    "mlstm": {"log_input_gate": np.zeros((LENGTH, 1), np.float32), "log_forget_gate": FORGETS},
    "gated_slot": {"log_decay": FORGETS_ALIKE},
    # One-hot values have LENGTH features.
    "mamba": {
        "step_size": np.full((LENGTH, 1, LENGTH), 0.05, np.float32),
        "rate": -np.ones((1, LENGTH, 8), np.float32),
    },
    "mamba2": {"step_size": -FORGETS, "rate": -np.ones(1, np.float32)},
    "delta_net": {"beta": WRITES, "key": UNIT},
    "gated_delta_net": {"beta": WRITES, "key": UNIT, "log_decay": FORGETS},
    "kimi_delta": {"beta": WRITES, "key": UNIT, "log_decay": FORGETS_ALIKE},
    "gated_delta_net_2": {
        "key": UNIT,
        "log_decay": FORGETS_ALIKE,
        "erase": np.full((LENGTH, 1, 8), 0.1, np.float32),
        "write": np.full((LENGTH, 1, LENGTH), 0.1, np.float32),
    },
    "delta_product": {
        "beta": np.full((LENGTH, 1, 2), 0.1, np.float32),
        "key": UNIT,
        "later_keys": UNIT[..., None, :],
        "later_values": np.zeros((LENGTH, 1, 1, LENGTH), np.float32),
    },
    "log_linear": {"log_decay": FORGETS, "levels": np.ones((LENGTH, 1, 8), np.float32)},
    "mesa": {
        "beta": WRITES,
        "log_decay": FORGETS,
        "regulariser": np.ones((1, 8), np.float32),
        "num_steps": 8,
    },
    "titans": {
        "learning_rate": WRITES,
        "key": UNIT,
        "momentum": 4 * WRITES,
        "log_decay": FORGETS,
    },
    "mamba3": {
        "step_size": -FORGETS,
        "log_decay": FORGETS,
        "trapezoid": 5 * WRITES,
        "angle": np.full((LENGTH, 1, 4), 0.1, np.float32),
    },
    "rwkv6": {"log_decay": FORGETS_ALIKE, "bonus": np.ones((1, 8), np.float32)},
    "rwkv7": {
        "log_decay": FORGETS_ALIKE,
        "removal_key": UNIT,
        "learning_rate": np.full((LENGTH, 1, 8), 0.1, np.float32),
    },
    "performer": {"projection": VECTORS},
    "random_features": {"projection": VECTORS},
    "hedgehog": {"query_projection": VECTORS, "key_projection": VECTORS},
    "luna": {"pack_query": 2 * VECTORS[:, :8]},
    "cosformer": {"max_length": LENGTH},
    "routing": {"centroids": VECTORS[:, :8]},
}

# Causal patterns with about 8 keys per query; the last one has all keys.
REACHING: Mapping[str, Pattern] = {
    "window of 8": Causal() & SlidingWindow(7, 0),
    "window of 8, dilated by 4": Causal() & Dilated((7, 0), 4),
    "window of 4, 4 global tokens": longformer((3, 0), (0, 64, 128, 192), causal=True),
    "window of 3, 5 random tokens": Causal() & (SlidingWindow(2, 0) | RandomBlocks(1, 5, 0, True)),
    "strided, stride 16": sparse_transformer(16),
    "fixed, stride 16": sparse_transformer(16, "fixed"),
    "all of the past": Causal(),
}

TRAINED: Mapping[str, Mapping[str, Any]] = {
    "softmax": {},
    "sliding_window": {"local_window_size": (15, 0)},
    "sparse_transformer": {"stride": 8},
    "linear": {},
}
STEPS = 400


@dataclasses.dataclass(frozen=True)
class Config:
    """Draws the pictures of the documentation."""

    output: Path = IMAGES  # folder for the pictures


def has_weights(mechanism: registry.Mechanism) -> bool:
    """False without heads, and where outputs are not linear in the values."""
    return mechanism.takes_heads and mechanism.name != "ttt_linear"


def small_options(mechanism: registry.Mechanism) -> dict[str, Any]:
    """Returns options of a mechanism that suit LENGTH tokens, so that its pattern is visible."""
    options = dict(mechanism.options)
    if mechanism.options_at is not None:
        options |= mechanism.options_at(LENGTH)
    shown = {name: _small(option) for name, option in options.items()}
    if "causal" in mechanism.capabilities and Binding.of(mechanism.name).takes("is_causal"):
        shown["is_causal"] = True
    return shown | dict(SHOWN.get(mechanism.name, {}))


def _small(option: Any) -> Any:
    if isinstance(option, tuple | list):
        return tuple(map(_small, option))
    return min(option, LENGTH // 8) if isinstance(option, int) else option


def draw_all(path: Path, draws: Sequence[Callable[..., Any]]) -> None:
    """Writes a grid of pictures; each function draws on its argument `ax`."""
    columns = min(COLUMNS, len(draws))
    rows = math.ceil(len(draws) / columns)
    size = (2 * columns, 0.4 + 2.3 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for index, (draw, ax) in enumerate(zip(draws, grid.flat, strict=False)):
        draw(ax=ax)
        if index % columns:
            ax.tick_params(labelleft=False)
            ax.set_ylabel("")
        if index + columns < len(draws):
            ax.tick_params(labelbottom=False)
            ax.set_xlabel("")
        ax.title.set_fontsize(8)
        ax.tick_params(labelsize=7)
        ax.xaxis.label.set_fontsize(8)
        ax.yaxis.label.set_fontsize(8)
    for ax in grid.flat[len(draws) :]:
        ax.remove()
    save(figure, path)


def train(
    mechanism: str, options: Mapping[str, Any], corpus: corpora.Corpus
) -> tuple[TransformerLM, np.ndarray]:
    """Trains a small model on the bytes of a corpus; returns the model and held-out windows."""
    tokenizer = tokenizers.ByteTokenizer()
    task = NextToken.of(corpus, tokenizer, LENGTH, batch=16, eval_windows=16)
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        num_layers=2,
        features=64,
        num_heads=4,
        mixer={"name": mechanism, **options},
    )
    optimiser = optimisers.make_optimiser("muon", STEPS, warmup=0.1, clip=1.0, weight_decay=0.0)
    schedule = Schedule(STEPS, batch=16, accumulate=1, evaluate_every=STEPS)
    compiled = programs.Programs(
        lambda rngs: TransformerLM(config, rngs=rngs), optimiser, schedule, task
    )
    params, state = compiled.init(0)
    for step in range(STEPS):
        batch = programs.in_parts(task.training(16, 0, step), 16)
        params, state, _ = compiled.step(params, state, np.float32(0.03), batch)
    return compiled.model(params), task.valid[:, :-1].astype(np.int32)


def draw_trained(path: Path, corpus: corpora.Corpus) -> None:
    """Writes a picture with the attention weights of each trained model's last layer in a row."""
    figure = plt.figure(figsize=(9.6, 2.9 * len(TRAINED)), layout="constrained")
    rows = figure.subfigures(len(TRAINED), squeeze=False).flat
    for (mechanism, options), row in zip(TRAINED.items(), rows, strict=True):
        print(f"training {mechanism}", flush=True)
        model, windows = train(mechanism, options, corpus)
        analysis.draw_attention(model, windows[:1], layer=1, figure=row)
    save(figure, path)


def draw_costs(path: Path) -> None:
    """Writes a picture of the measured time of a training step, and of the size of a state."""
    layers = json.loads(COSTS.read_text(encoding="utf-8"))["layers"]
    seconds: dict[str, figures.Line] = {}
    sizes: dict[str, figures.Line] = {}
    for name in COMPARED:
        known = [e for e in layers if (e["mechanism"], e["direction"]) == (name, "causal")]
        timed = [e for e in known if "seconds" in e["passes"]["step"]]
        seconds[name] = (
            [e["length"] for e in timed],
            [e["passes"]["step"]["seconds"] for e in timed],
        )
        sizes[name] = [e["length"] for e in known], [e["state_bytes"] for e in known]
    states = figures.Quantity("decode state (MB)", 1e6)
    panels = (figures.Quantity("training step (ms)", 1e-3), seconds), (states, sizes)
    figures.draw_side_by_side(path, "One causal layer on two CPU cores", panels, "softmax")
    print(f"wrote {path}", flush=True)


def draw_alone(folder: Path, entry: registry.Mechanism) -> None:
    """Writes the picture of a mechanism to a file of its name."""
    figure, ax = plt.subplots(figsize=(3, 3), layout="constrained")
    analysis.draw(entry.name, LENGTH, ax=ax, **small_options(entry))
    ax.set_title("")
    save(figure, folder / f"{entry.name}.png")


def save(figure: Any, path: Path) -> None:
    """Writes a figure in 256 colours, which takes a third of the size of full colours."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, bbox_inches="tight", pad_inches=0.05)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(256).save(path, optimize=True)
    print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)", flush=True)


def write_pictures(folder: Path) -> None:
    """Writes all pictures."""
    corpus = corpora.load("sotu")  # first, as it may be missing
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mechanisms").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the output folder {folder}: {error.strerror}") from None
    patterns = [
        functools.partial(analysis.draw, pattern, LENGTH, name=name)
        for name, pattern in PATTERNS.items()
    ]
    draw_all(folder / "patterns.png", patterns)
    entries = [entry for entry in map(registry.get, registry.names()) if has_weights(entry)]
    mechanisms = [
        functools.partial(analysis.draw, entry.name, LENGTH, **small_options(entry))
        for entry in entries
    ]
    draw_all(folder / "mechanisms.png", mechanisms)
    for entry in entries:
        draw_alone(folder / "mechanisms", entry)
    draw_costs(folder / "costs.png")
    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    analysis.draw_receptive_field(REACHING, 8, 256, ax=ax)
    save(figure, folder / "receptive_field.png")
    draw_trained(folder / "attention.png", corpus)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.gallery", args=argv)
    return outcome.exit_status(
        lambda: write_pictures(Path(os.path.expanduser(config.output))),
        "stopped; the same command starts again",
    )


if __name__ == "__main__":
    sys.exit(main())
