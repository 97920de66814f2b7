"""Accuracy of pretrained encoders with approximate attention, without further training.

All layers of a pretrained encoder use an approximation of `experiments.approximation` with the
trained projections. Two tasks compare the results with those of exact attention:

- similarity of texts, by all-MiniLM-L6-v2: Spearman's rank correlation between the cosine
  similarities of all pairs of passages with exact and with approximate attention;
- maps of atoms, by rxnmapper: the share of the atoms of products that one attention head maps to
  the same atom of the reactants with exact and with approximate attention.

`python -m experiments.downstream` takes about two minutes on two cores; `--help` lists the options.
"""

import dataclasses
import functools
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # run as `python experiments/downstream.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.approximation import FAMILIES, counted
from experiments.harness import measurement, metrics, report
from experiments.harness.errors import UserError
from experiments.tasks import corpora

MOST = 512  # positions of the text encoder
REACTIONS = Path(__file__).parent / "data" / "reactions.json"
MEASURES = {
    "similarity": "rank correlation with exact attention",
    "atoms": "share of atoms mapped as by exact attention",
}

Record = dict[str, Any]
# `(family, size) -> agreement with exact attention`
Measure = Callable[[str, int], float]


@dataclasses.dataclass(frozen=True)
class Config(measurement.Measurement):
    """Measures the accuracy of pretrained encoders with approximate attention.

    A command that was stopped goes on; a finished run prints its tables again.
    """

    length: int = 128  # tokens of a passage, from 3 to 512, the positions of the text encoder
    texts: int = 16  # passages; all pairs are compared


def check(config: Config) -> None:
    """Raises `UserError` if the options do not fit together."""
    if not 3 <= config.length <= MOST:
        raise UserError(
            f"--length must be from 3 to {MOST}, the positions of the text encoder, got "
            f"{config.length}"
        )
    if config.texts < 3:
        raise UserError(f"--texts must be at least 3, got {config.texts}")
    most = min(config.length, max(map(len, tokens_of_reactions())) - 1)
    measurement.check_seed_and_sizes(config, most, str(most))


def function_of(family: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the attention function of a family with its options."""
    from effattn.nn.binding import resolve

    function, _, options = resolve(FAMILIES[family].mechanism, options)
    return functools.partial(function, **options)


def similarity(config: Config, corpus: corpora.Corpus) -> Measure:
    """Returns the measure of the text encoder.

    Raises:
      UserError: too little held-out text.
    """
    import jax
    import numpy as np

    from experiments import encoder

    model, tokenizer = encoder.load()
    tokens = passages(config, corpus, tokenizer)
    head_dim = model.head_dim

    def similarities(attention: Callable[..., Any]) -> np.ndarray:
        hidden, _ = jax.jit(lambda model, tokens: model(tokens, attention))(model, tokens)
        embedded = np.asarray(hidden).mean(1)
        embedded /= np.linalg.norm(embedded, axis=-1, keepdims=True)
        return (embedded @ embedded.T)[np.triu_indices(len(tokens), 1)]

    import effattn

    exact = similarities(effattn.dot_product_attention)

    def kept(family: str, size: int) -> float:
        rng = jax.random.fold_in(jax.random.key(config.seed), size)
        options = FAMILIES[family].options(size, config.length, head_dim, rng)
        return rank_correlation(exact, similarities(function_of(family, options)))

    return kept


def passages(config: Config, corpus: corpora.Corpus, tokenizer: Any) -> Any:
    """Returns passages of held-out documents, int `(texts, length)`, evenly spread."""
    import numpy as np

    found = []
    for document in corpus.valid:
        # The first and the last token mark the start and the end.
        start, *inner, end = tokenizer.encode(document.decode()).ids
        size = config.length - 2
        for first in range(0, len(inner) - size + 1, size):
            found.append([start, *inner[first : first + size], end])
    if len(found) < config.texts:
        raise UserError(
            f"--texts must be at most {len(found)}, the number of held-out passages with --length "
            f"{config.length} tokens, got {config.texts}"
        )
    return np.array(found)[np.linspace(0, len(found) - 1, config.texts).astype(int)]


def rank_correlation(one: Any, other: Any) -> float:
    """Returns Spearman's correlation of numbers without ties."""
    import numpy as np

    ranks = [np.argsort(np.argsort(numbers)) for numbers in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def tokens_of_reactions() -> list[list[str]]:
    """Returns the tokens of the reactions in the tests of rxnmapper."""
    from experiments import atom_mapper

    reactions = json.loads(REACTIONS.read_text(encoding="utf-8"))
    return [atom_mapper.tokens_of(each["reaction"]) for each in reactions]


def atoms(config: Config) -> Measure:
    """Returns the measure of the atom mapper, on the reactions with more tokens than any size."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import effattn
    from experiments import atom_mapper

    model, vocabulary = atom_mapper.load()
    reactions = [tokens for tokens in tokens_of_reactions() if len(tokens) > max(config.sizes)]
    lengths = list(map(len, reactions))
    longest = max(lengths)
    ids = [atom_mapper.token_ids(vocabulary, tokens) for tokens in reactions]
    rows = jnp.array([[*row, *[0] * (longest - len(row))] for row in ids])

    def maps(function_for: Callable[..., Any], options: Mapping[str, Any]) -> list[int]:
        """The map of each atom; arrays in `options` have the reactions as first axis."""

        def weights(model, tokens, length, options):
            attend = functools.partial(function_for(options), key_value_seq_lengths=length[None])
            return atom_mapper.attention_weights(model, tokens[None], attend)[0]

        run = jax.jit(jax.vmap(weights, (None, 0, 0, 0)))
        found = np.asarray(run(model, rows, jnp.array(lengths), options))
        each = zip(reactions, found, lengths, strict=True)
        return [
            atom
            for tokens, of, length in each
            for atom in atom_mapper.atom_map(tokens, of[:length, :length]).reactant
        ]

    exact = maps(lambda _: effattn.dot_product_attention, {})

    def kept(family: str, size: int) -> float:
        rng = jax.random.fold_in(jax.random.key(config.seed), size)
        options = FAMILIES[family].options
        each = [padded(options(size, n, model.head_dim, rng), longest) for n in lengths]
        arrays = {
            name: jnp.stack([of[name] for of in each])
            for name, option in each[0].items()
            if isinstance(option, jax.Array)
        }
        static = {name: option for name, option in each[0].items() if name not in arrays}
        found = maps(lambda arrays: function_of(family, {**static, **arrays}), arrays)
        return float(np.mean([one == other for one, other in zip(found, exact, strict=True)]))

    return kept


def padded(options: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Returns options with zeros for padded tokens in the projections of Linformer."""
    import jax.numpy as jnp

    of_tokens = {n: x for n, x in options.items() if n in ("key_projection", "value_projection")}
    return {
        **options,
        **{n: jnp.pad(x, ((0, 0), (0, length - x.shape[1]))) for n, x in of_tokens.items()},
    }


def cases(config: Config, tasks: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Yields the task, the family and the size of each record."""
    for task in tasks:
        for name, family in FAMILIES.items():
            # Both encoders have heads of 32.
            for size in family.sizes(config.sizes, 32):
                yield task, name, size


def table(records: Sequence[Record]) -> str:
    """Returns a Markdown table, with one column per task."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for record in records:
        of_case = cells.setdefault((record["family"], record["size"]), {})
        of_case[record["task"]] = f"{record['kept']:.3f}"
    rows = [[f, str(n), *(row.get(task, "-") for task in tasks)] for (f, n), row in cells.items()]
    header = ["approximation", "size", *(f"{task}: {MEASURES[task]}" for task in tasks)]
    return report.markdown_table(header, rows)


def write_figure(path: Path, records: Sequence[Record]) -> None:
    """Draws the agreement with exact attention against the size, in one panel per task."""
    from effattn.analysis.style import line
    from experiments.harness.figure import legend_below, plt, save

    tasks = list(dict.fromkeys(record["task"] for record in records))
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(1 + 4.2 * len(tasks), 4.2), squeeze=False, layout="constrained"
    )
    for task, axis in zip(tasks, axes[0], strict=True):
        for index, family in enumerate(FAMILIES):
            points = [r for r in records if (r["task"], r["family"]) == (task, family)]
            axis.plot(
                [record["size"] for record in points],
                [record["kept"] for record in points],
                label=family,
                **line(index),
                linewidth=1.6,
                markersize=5,
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(title=task, xlabel="size", ylabel=textwrap.fill(MEASURES[task], 30))
        axis.grid(alpha=0.3)
    legend_below(figure, axes[0, 0].get_lines(), f"size: {counted()}")
    save(figure, path)


def run(config: Config, folder: Path, made: dict[str, Any], corpus: corpora.Corpus) -> None:
    """Measures what is missing in the folder, and writes the report."""
    path = folder / "summary.json"
    records: list[Record] = []
    if path.is_file():
        remedy = "delete it, and the same command starts again"
        rows = {"records": ("task", "family", "size", "kept")}
        records = metrics.read_json(path, (), remedy, rows)["records"]
    done = {(r["task"], r["family"], r["size"]) for r in records}
    make = {"similarity": lambda: similarity(config, corpus), "atoms": lambda: atoms(config)}
    tasks = ["similarity", "atoms"] if made["config"]["encoder"] else ["atoms"]
    measures: dict[str, Measure] = {}
    for case in cases(config, tasks):
        if case in done:
            continue
        task, family, size = case
        if task not in measures:
            measures[task] = make[task]()
        kept = measures[task](family, size)
        records.append({"task": task, "family": family, "size": size, "kept": kept})
        print(f"{task}  {family}  size {size}: {kept:.3f}", flush=True)
        metrics.write_atomically(path, json.dumps({**made, "records": records}, indent=2) + "\n")
    write_figure(folder / "kept.png", records)
    count = sum(len(tokens) > max(config.sizes) for tokens in tokens_of_reactions())
    explained = {
        "similarity": "Similarity: all-MiniLM-L6-v2 gives the cosine similarities of all pairs of "
        f"{config.texts} passages of {config.length} tokens; the table shows Spearman's rank "
        "correlation.",
        "atoms": "Atoms: one head of rxnmapper maps each atom of the products of a reaction to an "
        "atom of the reactants; the table shows the share of atoms with the same map in "
        f"{count} reactions, those with more tokens than the largest size.",
    }
    parts = [
        "# Accuracy of pretrained encoders with approximate attention",
        "All layers use the approximation, with the trained projections and no further training. "
        "The results are compared with those of exact attention. "
        f"{' '.join(explained[task] for task in tasks)} The size counts {counted()}.",
        table(records),
        "![Agreement with exact attention against the size](kept.png)",
        *report.configuration(made),
    ]
    report.write(folder, {**made, "records": records}, "\n\n".join(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.downstream", args=argv)
    optional, stopped = "the similarity of texts", "stopped; the same command goes on"
    return measurement.run("downstream", config, check, run, optional, "kept.png", stopped)


if __name__ == "__main__":
    sys.exit(main())
