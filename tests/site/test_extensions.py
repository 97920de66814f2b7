"""The parts that the site adds to its pages: facts of mechanisms, docstrings, links and tables."""

import pytest

from effattn import registry

pytest.importorskip("extensions", reason="installed without its documents")

from extensions import docstrings, generated_tables, mechanism_pages


@pytest.mark.parametrize("name", registry.names())
def test_a_page_has_all_about_a_mechanism(name):
    page = mechanism_pages.generated(name)
    for title in ("In short", "As code", "Where it runs", "What the tests guarantee"):
        assert f"\n## {title}\n" in f"\n{page}"
    assert f"](../../{mechanism_pages.source(registry.get(name))})" in page
    assert "\ndef naive(" in page


def test_a_page_says_what_a_call_needs():
    page = mechanism_pages.generated("gated_linear")
    assert "y = effattn.gated_linear_attention(query, key, value, log_decay=log_decay)" in page
    assert "| `log_decay` | required |" in page
    assert "`initial_state`" in page.partition("Shared [options]")[2].partition("\n")[0]


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
    assert converted("[x](../../Makefile)") == ("x", [])
    assert converted("[x](https://a.b/c)") == ("[x](https://a.b/c)", [])
    assert converted("[x\ny](../../README.md)") == ("[x\ny](../index.md)", [])
    assert converted("[x](nowhere.md)")[1] == ["docs/guides/nowhere.md"]
    text, _ = repository_links.converted("[x](docs/report.md)", "copied/contributing")
    assert text == "[x](../report.md)"
    assert converted("```\n[x](nowhere.md)\n```") == ("```\n[x](nowhere.md)\n```", [])
