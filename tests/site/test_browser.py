"""The built site in Chromium: layout, formulas, search, and no requests to other hosts.

`make docs` builds the site. Screenshots go to a temporary folder of pytest, or to the folder that
the environment variable SCREENSHOTS names.
"""

import os
import pathlib
import shutil

import pytest

import effattn

SITE = pathlib.Path(effattn.__file__).parents[1] / "docs" / "_build" / "html"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the site: make docs"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

PAGES = (
    "index",
    "one_page",
    "choosing",
    "compatibility",
    "sharp_bits",
    "report",
    "experiments",
    "mechanisms/index",
    "mechanisms/bigbird",
    "mechanisms/gated_delta_net",
    "mechanisms/hyena",
    "guides/own_mechanism",
    "design/delta_rule",
    "gallery/index",
    "api/effattn",
    "api/effattn.nn.SelfAttention",
    "copied/efficiency",
)
SIZES = {"desktop": (1300, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as engine:
        found = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def folder(tmp_path):
    chosen = pathlib.Path(os.environ.get("SCREENSHOTS", tmp_path))
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


def opened(browser, page, size="desktop", scheme="light"):
    """A page, and what went wrong when it was opened."""
    width, height = SIZES[size]
    view = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    wrong = []
    view.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    view.on(
        "request",
        lambda request: request.url.startswith("http") and wrong.append(f"asks {request.url}"),
    )
    view.goto((SITE / f"{page}.html").as_uri(), wait_until="load")
    return view, wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_its_window(browser, folder, page, size, scheme):
    view, wrong = opened(browser, page, size, scheme)
    name = f"{page.replace('/', '-')}-{size}-{scheme}.png"
    view.screenshot(path=folder / name, full_page=True)
    extent = view.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert not wrong
    assert extent[0] <= extent[1], "the page is wider than its window"
    assert not view.locator(".katex-error").count()
    view.close()


def test_formulas_are_rendered(browser):
    view, _ = opened(browser, "mechanisms/bigbird")
    assert view.locator(".katex-html").count()
    assert view.evaluate("document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Main'))")
    view.close()


def test_the_search_finds_a_mechanism(browser):
    view, _ = opened(browser, "search")
    view.goto((SITE / "search.html").as_uri() + "?q=sliding+window")
    view.wait_for_selector("#search-results li a", timeout=20_000)
    links = view.locator("#search-results li a").all_inner_texts()
    assert any("liding" in link for link in links)
    view.close()
