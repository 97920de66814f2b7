"""The parts that the site adds to its pages: facts of mechanisms, docstrings, links and tables."""

import re
import sys

import jax
import numpy as np
import pytest

import effattn
from effattn import registry
from tests.marks import slow_but_for

pytest.importorskip("extensions", reason="installed without its documents")

from extensions import docstrings, generated_tables, mechanism_pages


# The build of the site generates all pages.
@pytest.mark.parametrize(
    "name", slow_but_for(("linear", "gated_attention", "mamba"), registry.names())
)
def test_a_page_has_all_about_a_mechanism(name):
    page = mechanism_pages.generated(name)
    for title in ("In short", "As code", "Where it runs", "What the tests guarantee"):
        assert f"\n## {title}\n" in f"\n{page}"
    assert f"](../../{mechanism_pages.source(registry.get(name))})" in page
    assert "\ndef naive(" in page


def test_a_page_says_what_a_call_needs():
    page = mechanism_pages.generated("gated_linear")
    assert "| `log_decay` | required |" in page
    assert "`initial_state`" in page.partition("Shared [options]")[2].partition("\n")[0]


def blocks(name):
    """The blocks of code of a page, with small arrays: formula, program if any, and layer."""
    found = re.findall(r"^```python\n(.*?)^```", mechanism_pages.generated(name), re.M | re.S)
    sizes = {"1, 4096, 8, 64": "1, 160, 2, 8", "1, 4096, 512": "1, 160, 16"}
    sizes |= {"    512,\n": "    16,\n", "num_heads=8": "num_heads=2", "4096, 512": "160, 16"}
    for large, small in (sizes | {"4096": "160"}).items():
        found = [block.replace(large, small) for block in found]
    return found


def show_formula(name, code, monkeypatch):
    """Puts the functions of a page in place of those that the naive form runs."""
    naive = registry.get(name).naive
    functions = vars(sys.modules[naive.__module__])
    shown = dict(functions)
    exec(code, shown)
    changed = [name for name, value in functions.items() if shown[name] is not value]
    assert {"naive", naive.__name__} & set(changed)
    for each in changed:
        monkeypatch.setattr(functions[each], "__code__", shown[each].__code__)


def assert_close(fast, naive):
    fast, naive = np.asarray(fast), np.asarray(naive)
    np.testing.assert_allclose(fast, naive, rtol=0, atol=2e-5 * np.abs(naive).max())


FUNCTIONS = [name for name in registry.names() if registry.get(name).function is not None]


@pytest.mark.parametrize(
    "name", slow_but_for(("linear", "sliding_window", "lsh", "mamba", "titans"), FUNCTIONS)
)
def test_the_program_of_a_page_is_traced(name):
    _, program, _ = blocks(name)

    def run():
        names = {}
        exec(program, names)
        return names["y"]

    assert jax.eval_shape(run).shape in ((1, 160, 2, 8), (1, 160, 16))


@pytest.mark.parametrize("name", slow_but_for(("linear", "sliding_window"), FUNCTIONS))
def test_the_program_of_a_page_agrees_with_its_formula(name, monkeypatch):
    formula, program, _ = blocks(name)
    show_formula(name, formula, monkeypatch)
    function = registry.get(name).function.__name__
    slow_program = program.replace(f"effattn.{function}(", f"effattn.naive.{name}(")
    assert slow_program != program
    fast, slow = {}, {}
    exec(program, fast)
    exec(slow_program, slow)
    assert_close(fast["y"], slow["y"])


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_the_layer_of_a_page_runs_and_agrees_with_a_formula_of_layers(name, monkeypatch):
    formula, *_, layer = blocks(name)
    names = {}
    exec(layer, names)
    assert names["y"].shape == ((1, 1, 16) if "state" in names else (1, 160, 16))
    if name not in FUNCTIONS:
        show_formula(name, formula, monkeypatch)
        x = jax.random.normal(jax.random.key(0), names["x"].shape)
        naive = getattr(effattn.naive, name)(names["layer"], x)
        assert_close(names["layer"](x), naive)


def test_a_page_shows_measured_costs():
    page = mechanism_pages.generated("linear")
    assert "| causal | 16,384 |" in page and "| bidirectional | 16,384 |" in page


def test_tables_have_every_mechanism_of_a_direction():
    for direction in ("causal", "bidirectional"):
        table = generated_tables.costs(direction)
        for name in registry.names():
            listed = f"](mechanisms/{name}.md) |" in table
            assert listed == (direction in registry.get(name).capabilities)


def test_an_indented_formula_is_a_literal_block():
    lines = [
        "Linear attention.",
        "",
        "    S_t = S_(t-1) + k v",
        "",
        "Done.",
        "",
        "Args:",
        "  x: a.",
    ]
    assert docstrings.with_literal_blocks(lines) == [
        *lines[:2], "::", "", *lines[2:]
    ]  # fmt: skip


def test_characters_of_restructuredtext_stand_for_themselves():
    lines = ["Distance |i - j|, and `a|b`.", "", "Args:", "  **options: r. All *B.", "    b. two"]
    assert docstrings.with_literal_blocks(lines) == [
        r"Distance \|i - j\|, and `a|b`.",
        "",
        "Args:",
        r"  **options: r\. All \*B.",
        r"    b\. two",
    ]


def test_links_to_files_become_links_to_pages():
    pytest.importorskip("sphinx", reason="needs the packages of the site")
    from extensions import repository_links

    def converted(line, page="guides/lab"):
        text, missing = repository_links.converted(line, page)
        return text, missing

    assert converted("[x](../report.md#lm)") == ("[x](../report.md#lm)", [])
    assert converted("[x](../../README.md)") == ("[x](../index.md)", [])
    assert converted("[x](../../effattn/registry.py)") == (
        '<a href="../_modules/effattn/registry.html">x</a>',
        [],
    )
    assert converted("[x](../examples/README.rst)", "index") == ("[x](gallery/index.rst)", [])
    assert converted("[x](../examples/dna_hyena_64k.py)", "index") == (
        "[x](gallery/dna_hyena_64k.rst)",
        [],
    )
    assert converted("[x](../../Makefile)") == ("x", [])
    assert converted("[x](https://a.b/c)") == ("[x](https://a.b/c)", [])
    assert converted("[x\ny](../../README.md)") == ("[x\ny](../index.md)", [])
    assert converted("[x](nowhere.md)")[1] == ["docs/guides/nowhere.md"]
    text, _ = repository_links.converted("[x](docs/report.md)", "copied/contributing")
    assert text == "[x](../report.md)"
    assert converted("```\n[x](nowhere.md)\n```") == ("```\n[x](nowhere.md)\n```", [])


def test_links_to_results_are_those_of_their_headings():
    """The site makes identifiers of headings in lower case."""
    page = mechanism_pages.generated("delta_net")
    found = re.findall(r"\[([\w-]+)\]\(\.\./report\.md#([\w-]+)\)", page)
    assert ("states-small-S5", "states-small-s5") in found
    assert all(place == name.lower() for name, place in found)
