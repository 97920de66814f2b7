import functools
import json

import pytest
from flax import nnx

from benchmarks import layers
from effattn import registry
from tests.marks import slow_but_for


def run(folder, *argv):
    assert layers.main([*argv, "--length", "32", "--rounds", "2", "--output", str(folder)]) == 0
    return json.loads((folder / "layers.json").read_text()), (folder / "layers.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("backward", [(), ("--backward",)])
def test_layers_take_turns_with_exact_attention(tmp_path, capsys, backward):
    record, table = run(tmp_path, "--only", "hyena", "fnet", "aft_simple", *backward)
    rows = [(row["direction"], row["mechanism"]) for row in record["rows"]]
    causal = [("causal", name) for name in ("softmax", "aft_simple", "hyena")]
    assert rows == [
        *causal,
        *[("bidirectional", name) for name in ("softmax", "fnet", "aft_simple")],
    ]
    for row in record["rows"]:
        assert len(row["rounds"]) == 2 and row["temporary_bytes"] > 0
        if row["mechanism"] == "softmax":
            assert row["speedup"] == 1
    assert ("forward + backward" in table) == bool(backward)
    assert "| causal mechanism | ms |" in table and "| bidirectional mechanism | ms |" in table
    assert table in capsys.readouterr().out


def test_what_does_not_fit_is_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "MOST_BYTES", 1.5e6)
    record, table = run(tmp_path, "--only", "mixture_of_mechanisms")
    exact, mixture = (row for row in record["rows"] if row["direction"] == "causal")
    assert exact["seconds"] > 0
    assert mixture["seconds"] is None and "GB of " in mixture["skipped"]
    assert f"| `mixture_of_mechanisms` | - | {mixture['skipped']} | - |" in table


@pytest.mark.parametrize(
    "name", slow_but_for(("softmax", "sliding_window", "lsh", "cosformer"), registry.names())
)
def test_every_mechanism_has_a_layer_of_the_size_that_is_timed(name):
    for direction in {"causal", "bidirectional"} & registry.get(name).capabilities:
        nnx.eval_shape(functools.partial(layers.mixer_of, name, 256, direction == "causal"))


def test_wrong_arguments_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        layers.main(["--length", "3"])
    assert "must be a whole number, 16 or more, got '3'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert layers.main(["--output", str(tmp_path / "file" / "under")]) == 2
    assert "cannot write the output folder" in capsys.readouterr().err
