"""The command measures how much approximations keep of the results of pretrained encoders."""

import json
import re

import numpy as np
import pytest

from experiments import downstream, encoder
from experiments.approximation import Family, mean_pooling, window
from experiments.harness.report import SCHEMA
from experiments.tasks.corpora import Corpus
from tests.experiments.test_encoder import needs_package, small  # noqa: F401

FAMILIES = {
    "exact": Family("softmax", "keys", lambda *_: {}, lambda head_dim: head_dim),
    "window": Family("sliding_window", "keys", window),
    "means": Family("linformer", "rows", mean_pooling),
}


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(downstream, "FAMILIES", FAMILIES)
    monkeypatch.setattr(encoder, "is_installed", lambda: False)


class Tokenizer:
    def encode(self, text):
        self.ids = [0, *(1 + ord(c) % 16 for c in text), 0]
        return self


def test_atoms_are_measured_and_a_stopped_run_goes_on(
    tmp_path, folder_of_text, few, monkeypatch, capsys
):
    output = tmp_path / "run"
    command = ["--corpus", str(folder_of_text), "--output", str(output), "--sizes", "40"]
    made = downstream.atoms

    def interrupted(config):
        measure, cases = made(config), []

        def kept(family, size):
            cases.append(family)
            if len(cases) == 3:
                raise KeyboardInterrupt
            return measure(family, size)

        return kept

    monkeypatch.setattr(downstream, "atoms", interrupted)
    assert downstream.main(command) == 130
    assert not (output / "summary.md").exists()
    summary = output / "summary.json"
    stopped = json.loads(summary.read_text())
    assert len(stopped["records"]) == 2
    summary.write_text(json.dumps({**stopped, "records": [{}]}))
    assert downstream.main(command) == 1
    said = capsys.readouterr()
    assert "summary.json is damaged; delete it" in said.err
    summary.write_text(json.dumps(stopped))
    assert downstream.main(command) == 0
    out = said.out + capsys.readouterr().out
    assert out.count("atoms  window  size 40") == 1 and encoder.INSTALL in out
    summary = json.loads((output / "summary.json").read_text())
    assert summary["schema"] == SCHEMA
    text = (output / "summary.md").read_text()
    # The text encoder was not installed.
    assert f"`{summary['command']}`" in text and "Atoms: " in text and "Similarity: " not in text
    kept = {record["family"]: record["kept"] for record in summary["records"]}
    # Most atoms of the products are farther than 20 tokens from those of the reactants.
    assert kept["exact"] == 1 and kept["window"] < 0.3 and 0 < kept["means"] < 1
    assert (output / "kept.png").stat().st_size > 10_000
    assert downstream.main(command) == 0
    assert "This run is finished" in capsys.readouterr().out


def test_similarities_of_exact_attention_are_kept(small, few, monkeypatch):  # noqa: F811
    monkeypatch.setattr(encoder, "load", lambda: (small[0], Tokenizer()))
    corpus = Corpus((b"",), tuple(bytes([97 + i]) * 9 + b"elsewhere" for i in range(6)))
    config = downstream.Config(length=8, texts=5)
    kept = downstream.similarity(config, corpus)
    assert kept("exact", 4) == pytest.approx(1)
    assert -1 < kept("window", 1) < 0.99


def test_passages_are_of_held_out_documents():
    corpus = Corpus((b"",), (b"short", b"abcdefghijklm", b"nopqrstuvwxyz"))
    config = downstream.Config(length=7, texts=3)
    passages = downstream.passages(config, corpus, Tokenizer())
    assert passages.shape == (3, 7) and (passages[:, [0, -1]] == 0).all()
    assert len(np.unique(passages, axis=0)) == 3
    with pytest.raises(downstream.UserError, match="--texts must be at most 5"):
        downstream.passages(downstream.Config(length=7, texts=6), corpus, Tokenizer())


def test_rank_correlation():
    assert downstream.rank_correlation([1, 5, 9], [2, 3, 40]) == pytest.approx(1)
    assert downstream.rank_correlation([1, 5, 9], [0, -3, -40]) == pytest.approx(-1)
    assert downstream.rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--sizes"], "--sizes must be from 1 to 98, got None"),
        (["--sizes", "99"], "--sizes must be from 1 to 98, got 99"),
        (["--sizes", "4", "4"], "--sizes must not repeat a size, got 4 4"),
        (["--texts", "2"], "--texts must be at least 3, got 2"),
        (["--length", "2"], "--length must be from 3 to 512, the positions of the text encoder"),
        (["--length", "9999"], "--length must be from 3 to 512, .* got 9999"),
        (["--seed", "-1"], "--seed must be from 0 to"),
        (["--corpus", "nowhere"], "--corpus must be sotu, an existing file or folder"),
    ],
)
def test_bad_options_are_named(tmp_path, folder_of_text, capsys, more, sentence):
    command = ["--corpus", str(folder_of_text), "--output", str(tmp_path / "run"), *more]
    assert downstream.main(command) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and re.search(sentence, error) and error.count("\n") == 1


@needs_package
def test_the_pretrained_encoder_keeps_its_similarities():
    text = b"In the year that is past, our nation has been at peace with all the world. " * 3
    corpus = Corpus((b"",), tuple(text + bytes([97 + i]) * 30 for i in range(5)))
    kept = downstream.similarity(downstream.Config(length=24, texts=5), corpus)
    assert kept("window", 24) > 0.5
