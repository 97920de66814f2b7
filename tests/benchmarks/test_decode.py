import json

from benchmarks import decode


def test_steps_after_each_prefix_are_timed_and_written(tmp_path, capsys):
    argv = ["--only", "linear", "softmax", "--prefixes", "3", "9", "--rounds", "2"]
    assert decode.main([*argv, "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "decode.json").read_text())
    linear, softmax = record["rows"]
    assert (linear["mechanism"], softmax["mechanism"]) == ("linear", "softmax")
    assert all(row["seconds"].keys() == {"3", "9"} for row in record["rows"])
    # The cache has room for the prefix and the steps; the sums have one size.
    assert softmax["state_bytes"] == 2 * 13 * decode.FEATURES * 4 + 4
    assert linear["state_bytes"] == decode.HEADS * 64 * 65 * 4 + 4
    table = (tmp_path / "decode.md").read_text()
    assert table in capsys.readouterr().out
    assert "| mechanism | state, kB | after 3 | after 9 | ratio |" in table
