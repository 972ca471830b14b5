"""The site of all results in a real browser: every page, on a phone and in the dark."""

import urllib.parse

import pytest

from experiments.harness import registry
from experiments.site import __main__ as command
from tests import browser as browsers
from tests import contrast, site_helpers

pytestmark = browsers.needs_browser()
PAGES = ["index", *registry.names()]
PHONE = 390
FILLED = ["index", "claims", "compare", "errors", "ring"]  # every kind of page
_BOX = """(element) => {
  const box = element.getBoundingClientRect();
  return [box.x, box.y, box.width, box.height];
}"""
_PLACES = """() => ({
  links: [...document.querySelectorAll("a[href]")].map((a) => a.href),
  ids: [...document.querySelectorAll("[id]")].map((e) => e.id),
  broken: [...document.images].filter((i) => i.complete && !i.naturalWidth)
    .map((i) => i.src),
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, of fabricated results."""
    results = tmp_path_factory.mktemp("results")
    site_helpers.some_results(results)
    assert command.main(["--results", str(results)]) == 0
    return results / "site"


@pytest.fixture(scope="module")
def browser():
    with browsers.started() as browser:
        yield browser


@pytest.fixture(scope="module")
def seen(site, browser):
    """What a phone in the dark sees on every page; complaints of any page fail."""
    found = {}
    for name in [*PAGES, "step"]:
        with browsers.opened(
            browser, site / f"{name}.html", width=PHONE, scheme="dark"
        ) as page:
            found[name] = page.evaluate(_PLACES) | {
                "wide": browsers.too_wide(page),
                "poor": contrast.poor(page),
            }
            if name in FILLED:
                browsers.screenshot(page, f"site-{name}-phone-dark")
    return found


def test_nothing_reaches_over_the_edge_of_a_phone(seen):
    assert {name: page["wide"] for name, page in seen.items() if page["wide"]} == {}


def test_texts_are_readable_in_the_dark(seen):
    assert {name: page["poor"] for name, page in seen.items() if page["poor"]} == {}


@pytest.mark.parametrize("name", FILLED)
def test_texts_are_readable_in_the_light(site, browser, name):
    with browsers.opened(browser, site / f"{name}.html") as page:
        assert contrast.poor(page) == []
        assert browsers.too_wide(page) == []
        browsers.screenshot(page, f"site-{name}")


def test_every_link_leads_to_a_place(site, seen):
    """Of every page, as the browser reads them."""
    links = {(name, link) for name, page in seen.items() for link in page["links"]}
    assert len(links) > 10 * len(PAGES)
    assert ("step", (site / "index.html").as_uri()) in links
    for name, link in links:
        url = urllib.parse.urlsplit(link)
        assert url.scheme == "file", (name, link)
        path = site.__class__(urllib.parse.unquote(url.path))
        assert path.is_relative_to(site) and path.is_file(), (name, link)
        if url.fragment and path.stem != "step":
            ids = seen[path.stem]["ids"]
            assert urllib.parse.unquote(url.fragment) in ids, (name, link)


def test_pictures_are_shown_whole(site, browser, seen):
    broken = [src for name, page in seen.items() for src in page["broken"]]
    assert all("/files/errors/" in src for src in broken)  # those are no pictures
    with browsers.opened(browser, site / "compare.html") as page:
        (image,) = page.query_selector_all("figure img")
        image.scroll_into_view_if_needed()
        page.wait_for_function("document.images[0].complete")
        assert image.evaluate("i => [i.naturalWidth, i.naturalHeight]") == [2000, 40]
        _, _, width, height = image.evaluate(_BOX)
        assert width / height == pytest.approx(50, rel=0.02)


def test_bars_are_as_long_as_numbers(site, browser):
    with browsers.opened(browser, site / "index.html") as page:
        card = page.locator("section.card", has_text="the busiest device sends").first
        widths = card.locator(".fill").evaluate_all(
            "all => all.map(b => b.getBoundingClientRect().width)"
        )
        names = card.locator("dt").all_inner_texts()
    longest = max(widths)
    shares = {n: round(w / longest, 2) for n, w in zip(names, widths, strict=True)}
    assert shares == {
        "DataParallel": 0.5,
        "gather to root": 1.0,
        "N servers": 0.25,
        "ring": 0.25,
    }


def test_the_keyboard_reaches_everything(site, browser):
    """The first key leads past the bar; focus is always seen, and never behind it."""
    with browsers.opened(browser, site / "compare.html", width=PHONE) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the content"
        assert page.locator(".skip").evaluate(_BOX)[0] >= 0
        page.keyboard.press("Enter")
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    """() => {
                      const e = document.activeElement;
                      const box = e.getBoundingClientRect();
                      const bar = document.querySelector(".bar");
                      return [e.tagName, getComputedStyle(e).outlineStyle,
                              box.bottom > bar.getBoundingClientRect().bottom,
                              e.rel || ""];
                    }"""
                )
            )
            if reached[-1][3] == "next":
                break
        tags = {tag for tag, *_ in reached}
        assert {"A", "SUMMARY", "PRE", "DIV"} <= tags and reached[-1][3] == "next"
        assert all(style != "none" and below for _, style, below, _ in reached)


def test_the_bar_stays_and_targets_are_below_it(site, browser):
    with browsers.opened(
        browser, site / "claims.html", fragment="CA3", width=PHONE, height=500
    ) as page:
        page.wait_for_function("window.scrollY > 0")
        _, top, _, height = page.locator(".bar").evaluate(_BOX)
        assert top == pytest.approx(0, abs=1)
        assert page.locator("#CA3").evaluate(_BOX)[1] >= height - 1


def test_program_text_unfolds(site, browser):
    with browsers.opened(browser, site / "compare.html") as page:
        text = page.get_by_text("HloModule <small>")
        assert not text.is_visible()
        page.get_by_text("Ring step").click()
        assert text.is_visible()
