import json

import pytest

from benchmarks import decode


def test_steps_after_each_prefix_are_timed_and_written(tmp_path, capsys):
    argv = ["--only", "linear", "softmax", "--prefixes", "3", "9", "--rounds", "2"]
    assert decode.main([*argv, "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "decode.json").read_text())
    linear, softmax = record["rows"]
    assert (linear["mechanism"], softmax["mechanism"]) == ("linear", "softmax")
    assert all(row["seconds"].keys() == {"3", "9"} for row in record["rows"])
    # The KV cache has room for prefix and steps; the state of linear attention has a fixed size.
    assert softmax["state_bytes"] == 2 * 13 * decode.FEATURES * 4 + 4
    assert linear["state_bytes"] == decode.HEADS * 64 * 65 * 4 + 4
    table = (tmp_path / "decode.md").read_text()
    assert table in capsys.readouterr().out
    assert "| mechanism | state, kB | after 3 | after 9 | ratio |" in table


@pytest.mark.parametrize("option", ["--prefixes", "--rounds"])
@pytest.mark.parametrize("value", ["0", "-3", "x"])
def test_a_number_that_is_none_is_named(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        decode.main([option, value])
    assert f"{option}: must be a whole number, 1 or more, got '{value}'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert decode.main(["--output", str(tmp_path / "file" / "under")]) == 2
    assert "cannot write the output folder" in capsys.readouterr().err
