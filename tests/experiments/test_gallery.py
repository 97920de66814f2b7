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


@pytest.mark.parametrize("name", slow_but_for(FIRST_NAMES, NAMES))
def test_every_mechanism_is_shown_with_options_for_a_short_sequence(name):
    entry = registry.get(name)
    shades = picture(name, gallery.LENGTH, 0, gallery.small_options(entry)).shades
    causal = np.tri(gallery.LENGTH, dtype=bool)
    if "causal" in entry.capabilities:
        assert (shades[~causal] == 0).all()
    # All but those that see all of the past, in whatever way, leave something out or shade it.
    assert entry.family != "sparse" or (shades[causal] < 0.99).any()


@pytest.mark.slow
def test_all_pictures_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "PATTERNS", {"Full()": patterns.Full()})
    monkeypatch.setattr(gallery, "TRAINED", {"linear": {}})
    monkeypatch.setattr(gallery, "STEPS", 2)
    monkeypatch.setattr(gallery.registry, "names", lambda: ("softmax",))
    gallery.main(tmp_path)
    names = ["attention.png", "mechanisms.png", "patterns.png", "receptive_field.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for path in tmp_path.iterdir():
        assert plt.imread(path).std() > 0
    assert plt.get_fignums() == []
