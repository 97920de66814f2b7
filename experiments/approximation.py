"""Errors of approximations of softmax attention against their sizes.

The experiment measures the errors of the attention matrix and of the output against the number of
landmarks, features, keys and so on, for Gaussian queries and keys and for the queries and keys of a
pretrained encoder on real text. `python -m experiments.approximation` takes two minutes on two
cores; `--help` lists the options.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # run as `python experiments/approximation.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import checks, measurement, report
from experiments.harness.errors import UserError
from experiments.tasks import corpora

GAUSSIAN, PRETRAINED = "Gaussian", "MiniLM"
BEST = "best of that rank"
MEASURES = {"matrix": "error of the attention matrix", "output": "error of the output"}

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config(measurement.Measurement):
    """Measures the errors of approximations of softmax attention against their sizes.

    A finished run prints its tables again.
    """

    sizes: tuple[int, ...] = (8, 16, 32, 64, 128)  # landmarks, features, keys of a query, ...
    length: int = 256  # tokens; the pretrained encoder takes at most 512 and was made for 256
    texts: int = 4  # sequences to average over
    seed: int = 0  # seed of the Gaussian queries, keys and values and of random projections


@dataclasses.dataclass(frozen=True)
class Family:
    """Family of approximations of different sizes.

    Attributes:
      mechanism: registered name, or a function of query, key and value.
      size: name of the quantity that the size counts.
      options: `(size, length, head_dim, rng) -> options` of the mechanism's function.
      only_size: `(head_dim) -> size` of a family that has one size; None for any size.
    """

    mechanism: str | Callable[..., Any]
    size: str
    options: Callable[[int, int, int, Any], Mapping[str, Any]]
    only_size: Callable[[int], int] | None = None

    def sizes(self, sizes: Sequence[int], head_dim: int) -> Sequence[int]:
        """Returns the sizes to measure, of those given."""
        return sizes if self.only_size is None else (self.only_size(head_dim),)


def mean_pooling(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns Linformer projections to the means of `size` windows of nearly equal length."""
    import numpy as np

    window = np.arange(length) * size // length
    pooled = (window == np.arange(size)[:, None]).astype(np.float32)
    pooled /= pooled.sum(1, keepdims=True)
    return {"key_projection": pooled, "value_projection": pooled}


def random_projections(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns the random projections of an untrained Linformer."""
    import jax

    of_keys, of_values = jax.random.normal(rng, (2, size, length)) * length**-0.5
    return {"key_projection": of_keys, "value_projection": of_values}


def performer_features(orthogonal: bool):
    """Returns the options of Performer with orthogonal or independent random features."""

    def options(size, length, head_dim, rng):
        import effattn

        features = effattn.performer_features(rng, size, head_dim, orthogonal=orthogonal)
        return {"projection": features}

    return options


def trigonometric_features(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns random vectors `((size + 1) // 2, H)` for random feature attention, not trained.

    Their entries have standard deviation 1. Each vector gives a sine and a cosine. Queries and keys
    are normalised, so the weights are those of exp(q . k) for unit vectors, which are nearly equal.
    Larger deviations would give sharper weights, but then sums of features of both signs vanish.
    """
    import effattn

    return {"projection": effattn.performer_features(rng, (size + 1) // 2, head_dim)}


def window(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns a window of `size` tokens around each query."""
    return {"local_window_size": ((size - 1) // 2, size // 2)}


def random_blocks(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns the own block of a query and up to three random ones, at most `size` keys."""
    block = -(-size // 4)
    return {"block_size": block, "num_random_blocks": min(size, length) // block - 1}


def eight_blocks(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns blocks of BigBird: three around a query, the first one and four random ones."""
    numbers = {"num_window_blocks": 3, "num_global_blocks": 1, "num_random_blocks": 4}
    return {"block_size": -(-size // 8), **numbers}


def positions(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns the maximum length for the angles of cosFormer: 512, or the length if larger."""
    return {"max_length": max(512, length)}


def segments(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns segments of `size` tokens; a query reads means of all farther tokens."""
    return {"segment_size": size, "num_levels": 16, "num_summaries": 1}


def asymmetric_hashes(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns the options of `hashed` with two rounds of `size / 2` keys."""
    import jax

    vectors = jax.random.normal(rng, (2, head_dim + 2))
    return {"vectors": vectors, "cluster_size": (size + 1) // 2}


def hashed(
    query: Any,
    key: Any,
    value: Any,
    *,
    vectors: Any,
    cluster_size: int,
    key_value_seq_lengths: Any = None,
) -> Any:
    """Attends within clusters of equal size of locality-sensitive hashes (LSH).

    The mechanism "lsh" shares queries and keys, so that it cannot approximate other attention. This
    function hashes queries and keys apart (Daras et al. 2020, "SMYRF: Efficient Attention using
    Asymmetric Clustering"): with the largest norms M and M' of queries and keys, the distance of

        [q ; 0 ; sqrt(M^2 + M'^2 - |q|^2)]  and  [k ; sqrt(M^2 + M'^2 - |k|^2) ; 0]

    falls with q . k. In each round, queries and keys are sorted by their products with a random
    vector and cut in clusters; a query attends to the keys in the cluster of the same index, and
    to each key once. All pairs are masked, so the function shows errors and no cost.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, N, H)`.
      value: `(*B, T, N, Hv)`.
      vectors: `(rounds, H + 2)`.
      cluster_size: keys in a cluster.
      key_value_seq_lengths: `(*B)` int, valid tokens, as queries and as keys.
    """
    import jax.numpy as jnp

    import effattn

    length = query.shape[-3]
    lengths = length if key_value_seq_lengths is None else key_value_seq_lengths[..., None]
    valid = jnp.arange(length) < lengths  # (*B, T)
    query, key = (jnp.where(valid[..., None, None], x, 0) for x in (query, key))
    squares = [(x**2).sum(-1, keepdims=True) for x in (query, key)]
    total = sum(square.max(-3, keepdims=True) for square in squares)
    of_query, of_key = (jnp.sqrt(jnp.maximum(total - square, 0)) for square in squares)
    zero = jnp.zeros_like(of_query)
    points = ([query, zero, of_query], [key, of_key, zero])

    def clusters(parts):  # (*B, N, rounds, T)
        products = jnp.einsum("...tnh,rh->...nrt", jnp.concatenate(parts, -1), vectors)
        products = jnp.where(valid[..., None, None, :], products, jnp.inf)
        return products.argsort(-1).argsort(-1) // cluster_size

    of_query, of_key = map(clusters, points)
    mask = (of_query[..., :, None] == of_key[..., None, :]).any(-3)
    return effattn.dot_product_attention(
        query, key, value, mask=mask, key_value_seq_lengths=key_value_seq_lengths
    )


def count(size: int, length: int, head_dim: int, rng: Any) -> Mapping[str, Any]:
    """Returns the number of keys of a query."""
    return {"num_keys": min(size, length)}


def largest(
    query: Any, key: Any, value: Any, *, num_keys: int, key_value_seq_lengths: Any = None
) -> Any:
    """Attends to the keys with the largest weights, as an oracle would choose them.

    It compares all pairs, so it shows errors and no cost. Shapes are those of `hashed`.
    """
    import jax
    import jax.numpy as jnp

    import effattn

    logits = jnp.einsum("...tnh,...snh->...nts", query, key)
    if key_value_seq_lengths is not None:
        valid = jnp.arange(key.shape[-3]) < key_value_seq_lengths[..., None]
        logits = jnp.where(valid[..., None, None, :], logits, -jnp.inf)
    least = jax.lax.top_k(logits, num_keys)[0][..., -1:]
    return effattn.dot_product_attention(
        query, key, value, mask=logits >= least, key_value_seq_lengths=key_value_seq_lengths
    )


FAMILIES: Mapping[str, Family] = {
    "nystrom": Family(
        "nystrom", "landmarks", lambda m, length, head_dim, rng: {"num_landmarks": m}
    ),
    "linformer, means": Family("linformer", "projected rows", mean_pooling),
    "linformer, random": Family("linformer", "projected rows", random_projections),
    "performer, orthogonal": Family("performer", "features", performer_features(True)),
    "performer, independent": Family("performer", "features", performer_features(False)),
    "random features": Family("random_features", "features", trigonometric_features),
    "linear": Family("linear", "features", lambda *_: {}, lambda head_dim: head_dim),
    "cosFormer": Family("cosformer", "features", positions, lambda head_dim: 2 * head_dim),
    "Taylor series": Family(
        "based", "features", lambda *_: {}, lambda head_dim: (head_dim + 1) * (head_dim + 2) // 2
    ),
    "largest weights": Family(largest, "keys of a query", count),
    "window": Family("sliding_window", "keys of a query", window),
    "random blocks": Family("random", "keys of a query", random_blocks),
    "BigBird": Family("bigbird", "keys of a query", eight_blocks),
    "LSH, asymmetric": Family(hashed, "keys of a query", asymmetric_hashes),
    "hierarchical": Family("hierarchical", "tokens of a segment", segments),
}


def counted() -> str:
    """Returns the names of all sizes: "landmarks, ..., keys of a query or tokens of a segment"."""
    sizes = list(dict.fromkeys(family.size for family in FAMILIES.values()))
    return " or ".join([", ".join(sizes[:-1]), *sizes[-1:]])


def check(config: Config) -> None:
    """Raises `UserError` if the options do not fit together."""
    checks.check_counts(config, "length", "texts")
    measurement.check_seed_and_sizes(config, config.length, f"--length {config.length}")


def gaussian(config: Config, num_heads: int = 12, head_dim: int = 32) -> tuple[Any, ...]:
    """Returns normal queries, keys and values `(1, texts, T, N, H)`; logits have deviation 1."""
    import jax

    shape = (3, 1, config.texts, config.length, num_heads, head_dim)
    return tuple(jax.random.normal(jax.random.key(config.seed), shape))


def of_text(config: Config, corpus: corpora.Corpus) -> tuple[Any, ...]:
    """Returns queries, keys and values of the encoder's layers, `(layers, texts, T, N, H)` each.

    The texts are the first tokens of held-out documents, spread evenly over the documents that are
    long enough.

    Raises:
      UserError: the length exceeds the encoder's positions, or too few documents are long enough.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments import encoder

    model, tokenizer = encoder.load()
    if not 3 <= config.length <= model.max_length:
        raise UserError(
            f"--length must be from 3 to {model.max_length}, the positions of the pretrained "
            f"encoder, got {config.length}"
        )
    ids = [tokenizer.encode(document.decode()).ids for document in corpus.valid]
    long = [i for i in ids if len(i) >= config.length]
    if len(long) < config.texts:
        raise UserError(
            f"--texts must be at most {len(long)}, the number of held-out documents with --length "
            f"{config.length} tokens or more, got {config.texts}"
        )
    picked = np.linspace(0, len(long) - 1, config.texts).astype(int)
    # The last token is the end token.
    tokens = jnp.array([long[i][: config.length - 1] + long[i][-1:] for i in picked])
    _, layers = jax.jit(encoder.Encoder.__call__)(model, tokens)
    return tuple(jnp.stack(each) for each in zip(*layers, strict=True))


def measure(
    source: str, heads: tuple[Any, ...], config: Config
) -> tuple[list[Record], list[float]]:
    """Measures the errors of every family and size, and of the best matrix of each rank.

    Returns:
      `(records, ranks)`: a record for each family and size, with means over texts and heads by
      layer; and the effective rank of exact attention by layer.
    """
    import jax
    import jax.numpy as jnp

    from effattn import analysis

    query, key, _ = heads
    length, head_dim = query.shape[-3], query.shape[-1]
    singular = analysis.singular_values("softmax", query, key)
    energy = singular**2
    records: list[Record] = []

    def by_layer(array: Any) -> list[float]:
        return [float(mean) for mean in jnp.mean(array, axis=(1, 2))]

    def add(family: str, size: int, **errors: Any) -> None:
        records.append({"source": source, "family": family, "size": size, **errors})

    for size in config.sizes:
        left_out = energy[..., size:].sum(-1) / energy.sum(-1)
        add(BEST, size, matrix=by_layer(jnp.sqrt(left_out)), output=None)
    for name, family in FAMILIES.items():
        for size in family.sizes(config.sizes, head_dim):
            rng = jax.random.fold_in(jax.random.key(config.seed), size)
            options = family.options(size, length, head_dim, rng)
            error = analysis.approximation_error(family.mechanism, *heads, **options)
            add(name, size, matrix=by_layer(error.matrix), output=by_layer(error.output))
            mean = float(jnp.mean(error.matrix))
            print(f"{source}  {name}  size {size}: matrix {mean:.3f}", flush=True)
    return records, by_layer(analysis.effective_rank(singular))


def table(records: Sequence[Record]) -> str:
    """Returns a Markdown table of mean errors over layers, one column per source and measure."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    columns = []
    for record in records:
        for name in MEASURES:
            column = f"{record['source']}: {name}"
            columns.append(column)
            mean = "-" if record[name] is None else f"{sum(record[name]) / len(record[name]):.3f}"
            cells.setdefault((record["family"], record["size"]), {})[column] = mean
    columns = list(dict.fromkeys(columns))
    rows = [[f, str(n), *(row[c] for c in columns)] for (f, n), row in cells.items()]
    return report.markdown_table(["approximation", "size", *columns], rows)


def ranks_table(ranks: Mapping[str, Sequence[float]]) -> str:
    """Returns a Markdown table of the effective ranks of exact attention."""
    rows = [
        [source if len(by_layer) == 1 else f"{source}, layer {layer}", f"{rank:.1f}"]
        for source, by_layer in ranks.items()
        for layer, rank in enumerate(by_layer)
    ]
    return report.markdown_table(["queries and keys", "effective rank"], rows)


def write_figure(path: Path, records: Sequence[Record]) -> None:
    """Draws the mean error over layers of each family, in a band from the least to the largest."""
    from experiments.harness.figure import legend_below, plt, save

    sources = list(dict.fromkeys(record["source"] for record in records))
    figure, grid = plt.subplots(
        len(MEASURES),
        len(sources),
        figsize=(1 + 4 * len(sources), 7.2),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for name, row in zip(MEASURES, grid, strict=True):
        for source, ax in zip(sources, row, strict=True):
            draw(ax, name, [record for record in records if record["source"] == source])
        row[0].set_ylabel(f"relative {MEASURES[name]}")
    for source, top, bottom in zip(sources, grid[0], grid[-1], strict=True):
        top.set_title(f"queries and keys: {source}")
        bottom.set_xlabel("size")
    lines, _ = grid[0, 0].get_legend_handles_labels()
    mean = "mean over heads and layers; band: range over layers"
    mean = mean if PRETRAINED in sources else "mean over heads"
    legend_below(figure, lines, f"size: {counted()}\n{mean}")
    save(figure, path)


def draw(ax: Any, measure: str, records: Sequence[Record]) -> None:
    """Draws one measure of one source of queries and keys."""
    import numpy as np
    from matplotlib.ticker import LogLocator, NullFormatter

    from effattn.analysis.style import line

    for index, family in enumerate([*FAMILIES, BEST]):
        of_family = [r for r in records if r["family"] == family and r[measure] is not None]
        if not of_family:
            continue
        sizes = [record["size"] for record in of_family]
        errors = np.array([record[measure] for record in of_family])
        if family == BEST:
            style = {"color": "black", "linestyle": "--"}
        else:
            style = line(index)
            band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
            ax.fill_between(sizes, errors.min(1), errors.max(1), **band)
        ax.plot(sizes, errors.mean(1), linewidth=1.6, markersize=5, label=family, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.axhline(1, color="grey", linewidth=0.8)
    ax.grid(alpha=0.3)


def run(config: Config, folder: Path, made: dict[str, Any], corpus: corpora.Corpus) -> None:
    """Measures all errors and writes the report."""
    sources = {GAUSSIAN: functools.partial(gaussian, config)}
    if made["config"]["encoder"]:
        sources[PRETRAINED] = functools.partial(of_text, config, corpus)
    records: list[Record] = []
    ranks = {}
    for source, make in sources.items():
        found, ranks[source] = measure(source, make(), config)
        records += found
    write_figure(folder / "errors.png", records)
    summary = {**made, "errors": records, "effective_rank": ranks}
    parts = [
        "# Errors of approximations of softmax attention",
        "Relative Frobenius distances from exact attention, of the attention matrix and of the "
        f"output, means over {config.texts} sequences of {config.length} tokens, heads and layers. "
        f"Size counts {counted()}.",
        table(records),
        "![Errors against sizes](errors.png)",
        f"The effective rank of exact attention, of at most {config.length}:",
        ranks_table(ranks),
        *report.configuration(made),
    ]
    report.write(folder, summary, "\n\n".join(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.approximation", args=argv)
    optional = "queries and keys of a pretrained encoder"
    stopped = "stopped; the same command starts again"
    return measurement.run("approximation", config, check, run, optional, "errors.png", stopped)


if __name__ == "__main__":
    sys.exit(main())
