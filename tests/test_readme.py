"""The examples of the README, which run one after another."""

import pathlib
import re

import pytest

import effattn
from effattn.xla import block_attention

README = pathlib.Path(effattn.__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_all_examples_run_in_order(monkeypatch, tmp_path):
    """With a 16th of the tokens, and one tile of each kernel to try; without pretrained weights."""
    if not README.exists():
        pytest.skip("installed without its README")
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)  # a figure is saved
    tilings = block_attention.tilings
    monkeypatch.setattr(
        block_attention,
        "tilings",
        lambda *call: {kernel: tiles[:1] for kernel, tiles in tilings(*call).items()},
    )
    names = {}
    for example in re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S):
        if "from_transformers" not in example:
            shorter = re.sub("16384|16000|9000", lambda found: str(int(found[0]) // 16), example)
            exec(shorter, names)
    assert (tmp_path / "pattern.png").exists()
