"""The command `experiments.compress`, on models of a few thousand parameters."""

import json

import numpy as np
import pytest
from flax import nnx

from effattn import nn
from experiments import compress
from experiments.compression.training import silenced

TINY = """--layers 2 --heads 2 --width 8 --context 16 --batch 4 --eval-windows 4 --steps 4
    --recovery-steps 2 --fewer-heads 1""".split()


@pytest.mark.slow
def test_every_form_is_measured_before_and_after_it_is_trained_on(tmp_path, folder_of_text, capsys):
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(tmp_path / "run")]
    assert compress.main([*command, "--seeds", "0", "1"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    runs = {(run["way"], run["seed"]): run for run in summary["runs"]}
    assert len(runs) == len(summary["runs"]) == 2 * 5
    for seed in (0, 1):
        original = runs["original", seed]["bits_per_byte"]
        start = {
            form: runs[form, seed]["curve"][0]["bits_per_byte"] - original
            for form in ("longer", "int8", "int4", "heads-1")
        }
        assert start["longer"] == pytest.approx(0, abs=1e-6)
        assert 0 < abs(start["int8"]) < 0.01 and 0 < abs(start["int4"]) < 0.5
        assert start["heads-1"] != 0
    # The costs of single heads: by seed, layer and head.
    assert np.shape(summary["heads"]) == (2, 2, 2)
    sizes = summary["bytes"]
    assert sizes["original"] == sizes["longer"] > sizes["heads-1"] > sizes["int8"] > sizes["int4"]
    shown = capsys.readouterr().out
    assert "| 4 bits a weight " in shown and "| 1 head fewer in each layer " in shown
    assert compress.main([*command, "--seeds", "0", "1"]) == 0
    assert "This run is finished" in capsys.readouterr().out


def test_a_silenced_head_is_a_removed_head():
    config = nn.TransformerConfig(vocab_size=16, num_layers=2, features=16, num_heads=4)
    model = nn.TransformerLM(config, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    params = silenced({"trained": nnx.to_pure_dict(state)}, 1, 2, 4)["trained"]
    nnx.replace_by_pure_dict(state, params)
    tokens = np.arange(16).reshape(2, 8)
    np.testing.assert_allclose(
        nnx.merge(graph, state)(tokens)[0, :, :3],
        _with_other_layer_whole(model, tokens)[0, :, :3],
        rtol=1e-4,
        atol=1e-5,
    )


def _with_other_layer_whole(model, tokens):
    """The logits of the model whose second layer alone lacks its third head."""
    smaller = nn.prune_heads(model, [[0, 1, 3]] * 2)
    model.blocks[1].mixer = smaller.blocks[1].mixer
    return model(tokens)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--mechanisms", "softmax", "linear"], "--mechanisms must be one mechanism"),
        (["--mechanisms", "all"], "--mechanisms must be one mechanism"),
        (["--mechanisms", "linear"], "--fewer-heads must be empty, as heads are removed from"),
        (["--bits", "2"], "--bits must be 8, 4 or both, each once, got 2"),
        (["--bits", "4", "4"], "--bits must be 8, 4 or both, each once"),
        (["--fewer-heads", "2"], "--fewer-heads must be numbers from 1 to below the 2 key heads"),
        (["--fewer-heads", "1", "1"], "--fewer-heads must not repeat a number"),
        (["--bits", "--fewer-heads"], "--bits must not be empty together with --fewer-heads"),
        (["--sweep", "0.1"], "--sweep must be left out"),
        (["--recovery-steps", "0"], "--recovery-steps must be at least 1, got 0"),
        (["--recovery-rate", "0"], "--recovery-rate must be positive"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, folder_of_text, capsys, more, sentence):
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(tmp_path / "run"), *more]
    assert compress.main(command) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_qwix_the_bits_are_refused(tmp_path, folder_of_text, capsys, monkeypatch):
    monkeypatch.setattr(compress.importlib.util, "find_spec", lambda name: None)
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(tmp_path / "run")]
    assert compress.main(command) == 1
    assert "--bits needs the package qwix: pip install qwix" in capsys.readouterr().err
