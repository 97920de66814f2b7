"""`--import`: mechanisms of the user's own modules, trained by name."""

import json
import re
import sys

import pytest

from effattn import registry
from experiments import finetune, lm, recall, seq2seq
from tests.testing.test_library import example

MODULE = '''
import effattn
from effattn import registry


def doubled_attention(
    query, key, value, *, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None
):
    """Softmax attention to values twice as large."""
    return effattn.dot_product_attention(
        query,
        key,
        2 * value,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )


registry.register(
    registry.Mechanism(
        name="doubled",
        family="exact",
        paper="none",
        function=doubled_attention,
        complexity="O(N^2 H)",
        time_exponent=2.0,
    )
)
'''
FAULTY = """
import jax

from effattn import registry


def forgets(query, key, value):
    return {}["query"]


def fails(query, key, value):
    raise RuntimeError("too bad")


def has_no_gradient(query, key, value):
    return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: -x, value)


def takes_short_sequences(query, key, value):
    if value.shape[-3] > 12:
        raise ValueError(f"takes 12 tokens at most, got {value.shape[-3]}")
    return value


for function in (forgets, fails, has_no_gradient, takes_short_sequences):
    registry.register(
        registry.Mechanism(
            name=function.__name__,
            family="own",
            paper="none",
            function=function,
            capabilities=frozenset({"causal"}),
            complexity="O(N)",
            time_exponent=1.0,
        )
    )
"""
TINY = """--import their_mechanisms.doubled --layers 1 --width 8 --heads 2 --batch 4
    --steps 2 --seeds 0 --window 4""".split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with modules of a user; what they register is forgotten."""
    package = tmp_path / "their_mechanisms"
    package.mkdir()
    (package / "doubled.py").write_text(MODULE)
    (package / "broken.py").write_text("import no_such_package\n")
    (package / "ends.py").write_text("raise SystemExit(3)\n")
    (package / "faulty.py").write_text(FAULTY)
    (tmp_path / "fading.py").write_text(example())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_MECHANISMS", dict(registry._MECHANISMS))
    yield tmp_path
    of_user = ("their_mechanisms", "fading")
    for module in [name for name in sys.modules if name.startswith(of_user)]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (lm, "--context 16 --eval-windows 4 --optimiser adamw --corpus texts --mechanisms"),
        pytest.param(seq2seq, "--examples 40 --held-out 4 --mechanisms", marks=pytest.mark.slow),
    ],
    ids=["lm", "seq2seq"],
)
def test_a_mechanism_of_ones_own_module_is_trained(here, folder_of_text, capsys, script, options):
    command = [*TINY, "--output", "run", *options.split(), "doubled"]
    assert script.main(command) == 0, capsys.readouterr().err
    assert "| doubled " in capsys.readouterr().out
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["config"]["imports"] == ["their_mechanisms.doubled"]


@pytest.mark.slow
def test_the_example_of_the_guide_is_trained(here, folder_of_text, capsys):
    options = "--import fading --context 16 --eval-windows 4 --optimiser adamw --corpus texts"
    command = [*TINY, *options.split(), "--output", "run", "--mechanisms", "softmax", "fading"]
    assert lm.main(command) == 0, capsys.readouterr().err
    assert "| fading " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("their_mechanisms.tripled", "there is no module 'their_mechanisms.tripled' in the"),
        ("no_such_package.module", "there is no module 'no_such_package.module' in the current"),
        ("their_mechanisms/doubled.py", "must be the name of a Python module"),
        ("", "must be the name of a Python module, such as my_package.my_module, got ''"),
        (
            "their_mechanisms.broken",
            "the module 'their_mechanisms.broken' cannot be imported (ModuleNotFoundError: No",
        ),
        ("their_mechanisms.ends", "'their_mechanisms.ends' cannot be imported (SystemExit: 3)"),
    ],
)
@pytest.mark.parametrize("script", [lm, seq2seq], ids=["lm", "seq2seq"])
def test_a_module_that_cannot_be_imported_is_named(here, capsys, script, name, sentence):
    assert script.main(["--import", name, "--output", "run"]) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("error: --import") and error.count("\n") == 1
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("forgets", r"cannot be run here \(KeyError: 'query', at .*faulty.py:8\)"),
        ("fails", r"cannot be run here \(RuntimeError: too bad, at .*faulty.py:12\)"),
        ("has_no_gradient", "Reverse-mode differentiation does not work"),
        ("takes_short_sequences", "takes 12 tokens at most, got 20"),
    ],
)
def test_a_faulty_mechanism_is_refused_before_training(here, capsys, name, sentence):
    sizes = "vocabulary=16,trained=((12,2),),tested=((12,2),(20,2)),held_out_tokens=96"
    command = f"--import their_mechanisms.faulty --mechanisms {name} --task multi-query,{sizes}"
    assert recall.main([*command.split(), "--no-equal-parameters", "--output", "run"]) == 1
    error = capsys.readouterr().err
    assert re.search(sentence, error)
    assert error.startswith("error: --mechanisms: ") and error.count("\n") == 1
    assert not (here / "run").exists()


def test_models_are_not_converted_to_a_faulty_mechanism(here, folder_of_text, capsys):
    sizes = "--context 16 --width 8 --heads 2 --layers 1 --batch 4 --output run"
    command = f"--import their_mechanisms.faulty --mechanisms has_no_gradient {sizes}"
    assert finetune.main([*command.split(), "--corpus", str(folder_of_text)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --mechanisms: Reverse-mode differentiation does not work")
    assert error.count("\n") == 1 and not (here / "run").exists()


def test_without_imports_the_settings_are_as_before():
    assert "imports" not in lm.Config().of_runs() and "imports" not in lm.Config().of_folder()
    assert lm.Config(imports=("a",)).of_runs()["imports"] == ("a",)
