"""The examples of the README and of `docs/`: the examples of a page run one after another."""

import pathlib
import re

import pytest

import effattn
from effattn import registry
from effattn.xla import block_attention

ROOT = pathlib.Path(effattn.__file__).parents[1]
DOCUMENTS = ROOT / "docs"
# Folders of generated pages, and pages without examples.
LEFT_OUT = {"_build", "api", "copied", "gallery", "mechanisms"}
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted(DOCUMENTS.rglob("*.md")))
    if path.exists() and LEFT_OUT.isdisjoint(path.relative_to(ROOT).parts)
]
LINK = re.compile(r"\]\(([^)\s]+)\)")

pytestmark = pytest.mark.skipif(not PAGES, reason="installed without its documents")


def name_of(page):
    return str(page.relative_to(ROOT))


def examples_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def anchors_of(page):
    """The anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if examples_of(page)], ids=name_of)
def test_all_examples_run_in_order(page, monkeypatch, tmp_path):
    """Examples use 1/16 of the tokens, try one tile of each kernel, and load no weights."""
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)  # an example saves a figure
    monkeypatch.setattr(registry, "_MECHANISMS", dict(registry._MECHANISMS))  # for one page
    tilings = block_attention.tilings
    monkeypatch.setattr(
        block_attention,
        "tilings",
        lambda *call: {kernel: tiles[:1] for kernel, tiles in tilings(*call).items()},
    )
    names = {"__name__": "example"}
    for example in examples_of(page):
        if "from_transformers" not in example:
            shorter = re.sub("16384|16000|9000", lambda found: str(int(found[0]) // 16), example)
            exec(shorter, names)
    for figure in re.findall(r"savefig\(\"(.*?)\"\)", "".join(examples_of(page))):
        assert (tmp_path / figure).exists()


def test_the_examples_show_the_functions_the_modules_and_the_pictures():
    text = "".join("".join(examples_of(page)) for page in PAGES)
    for name in ("dot_product_attention", "as_attention_fn", "TransformerLM", "savefig", "tune("):
        assert name in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors_of(linked), target


def test_the_readme_and_the_site_count_the_mechanisms():
    mechanisms = len(registry.names())
    functions = sum(registry.get(name).function is not None for name in registry.names())
    readme, site = ((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/index.md"))
    assert f"It has {mechanisms} mechanisms" in readme
    assert f"and {functions} are pure functions" in readme
    assert f"{mechanisms} mechanisms as Flax modules, {functions} of them" in site
