"""The command line: `list`, `show` and `advise`."""

import subprocess
import sys

import numpy as np
import pytest

from effattn import registry
from effattn.__main__ import main
from effattn.advice import pages


def test_the_list_has_all_mechanisms_by_family():
    text = pages.catalogue()
    names = [line.split()[0] for line in text.splitlines() if line[:2] == "  " and line[2] != " "]
    listed = [name for name in names if name in registry.names()]
    assert sorted(listed) == sorted(registry.names())
    assert max(map(len, text.splitlines())) <= 80
    for line in text.splitlines():  # no line ends within a complexity
        assert line.count("(") == line.count(")") or "O(" not in line, line


def test_the_list_can_be_narrowed(capsys):
    assert main(["list", "--causal", "--decode", "--exact"]) == 0
    text = capsys.readouterr().out
    assert "softmax" in text and "sliding_window" not in text
    assert main(["list", "--family", "low rank", "--needs", "dropout", "--bidirectional"]) == 0
    text = capsys.readouterr().out
    assert "linformer" in text and "nystrom" not in text and "block_linformer" not in text


@pytest.mark.parametrize("name", ["sliding_window", "aft_full", "lstm", "synthesizer_random"])
def test_a_page_has_formula_options_and_support(name):
    text = pages.page(name)
    for title in ("Facts", "Description", "Formula as code", "Capabilities", "Implementations"):
        assert f"\n{title}" in text
    assert (
        "def naive(" in text
        and "Measured quality\n  none yet: results in fewer than three tasks" in text
    )


def test_a_page_documents_own_and_shared_options():
    text = pages.page("sliding_window")
    assert "local_window_size (required), in layers 127: w or (left, right), steps on" in text
    assert "is_causal = False: query i attends" in text
    assert text.count("def naive(") == 1 and "def in_window(" in text
    assert "max_global = None: maximum number of global tokens" in pages.page("longformer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "bigbrd"], "unknown mechanism 'bigbrd'; did you mean bigbird?"),
        (["show", "synth"], "did you mean synthesizer"),
        (["list", "--family", "spars"], "unknown family 'spars'; did you mean sparse"),
        (["list", "--needs", "masks"], "unknown capability 'masks'; did you mean mask"),
        (
            ["list", "--exact", "--family", "linear"],
            "no mechanism has kind exact, family linear; leave one of these out",
        ),
        (["advise", "--causal"], "length must be an int"),
        (["advise", "--bidirectional", "--decode"], "--decode needs --causal"),
        (["advise", "--causal", "--sample", "nowhere.npz"], "nowhere.npz"),
    ],
)
def test_errors_are_one_sentence_and_a_status(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_advice_on_a_sample_in_a_file(tmp_path, capsys):
    path = tmp_path / "heads.npz"
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 32, 1, 8)).astype(np.float32)
    np.savez(path, query=q, key=k, value=v)
    names = ["--mechanisms", "softmax", "sliding_window"]
    assert main(["advise", "--causal", "--sample", str(path), *names]) == 0
    assert "error" in capsys.readouterr().out.splitlines()[2]
    whole = path.read_bytes()
    np.savez(path, query=q)
    for content in (path.read_bytes(), whole[: len(whole) // 2], b"text"):
        path.write_bytes(content)
        assert main(["advise", "--causal", "--sample", str(path)]) == 2
        assert "arrays query, key, value" in capsys.readouterr().err


def test_the_list_runs_as_a_program_and_loads_no_flax():
    code = (
        "import sys; from effattn.__main__ import main; main(['list']); "
        "print([m for m in ('flax', 'optax', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    bad = subprocess.run([sys.executable, "-m", "effattn", "show", "softmx"], capture_output=True)
    assert bad.returncode == 2 and b"did you mean softmax" in bad.stderr
