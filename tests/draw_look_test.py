"""The step-through page in a real browser: colours, names, room, and hostile words."""

import dataclasses
import re

import pytest

from jaxdp import algorithms, draw
from jaxdp.draw.cells import COMPLETE, colour
from jaxdp.draw.frames import frames
from jaxdp.targets import hardware
from tests import browser as browsers

pytestmark = browsers.needs_browser()


@pytest.fixture(scope="module")
def browser():
    with browsers.started() as browser:
        yield browser


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "ring.html"
    draw.write_page(path)
    return path


@pytest.fixture
def page(browser, file):
    with browsers.opened(browser, file) as page:
        yield page


def test_everything_has_a_name_and_the_sentence_is_announced(page):
    nameless = page.evaluate(
        "() => [...document.querySelectorAll('button, input, select')].filter((e) => "
        "!(e.innerText || e.getAttribute('aria-label') || e.closest('label')?.innerText"
        "  || e.closest('label')?.textContent.trim())).map((e) => e.outerHTML)"
    )
    assert nameless == []
    said = page.locator("[aria-live=polite]")
    page.locator("body").press("ArrowRight")
    assert "After round 0 no chunk is complete yet" in said.inner_text()
    page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


def _rgb(text):
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cells_have_the_colours_of_the_figures(browser, file, scheme):
    with browsers.opened(browser, file, fragment="ring-4-3", scheme=scheme) as page:
        seen = page.evaluate(
            "() => cells.cells.map(column => column.map(cell => "
            "getComputedStyle(cell).backgroundColor))"
        )
    frame = frames(algorithms.ring(4))[3]
    for cell in frame.cells:
        expected = tuple(round(255 * part) for part in colour(cell.share))
        assert _rgb(seen[cell.device][cell.chunk]) == expected
    assert _rgb(seen[0][0]) == tuple(round(255 * part) for part in COMPLETE)


@pytest.mark.parametrize(
    ("fragment", "width", "scheme"),
    [
        ("ring-4-3", 1280, "light"),
        ("bidirectional_ring-8-2", 390, "light"),
        ("hierarchical-16-3", 390, "dark"),
    ],
)
def test_nothing_overflows(browser, file, fragment, width, scheme):
    look = {"fragment": fragment, "width": width, "scheme": scheme}
    with browsers.opened(browser, file, **look) as page:
        assert browsers.too_wide(page) == []
        browsers.screenshot(page, f"step-{fragment}-{width}-{scheme}")
        page.locator("summary").click()
        assert browsers.too_wide(page) == []


def test_your_own_schedule_and_a_hostile_title(browser, tmp_path):
    hostile = "</script><script>alert(1)</script><b>&\u2028{{data}}"
    own = dataclasses.replace(algorithms.direct(3), name=hostile)
    machine = dataclasses.replace(hardware("h100"), name=hostile)
    path = tmp_path / "own.html"
    home = '"><script>alert(2)</script>'
    draw.write_page(path, own, size_mb=1.5, hardware=machine, title=hostile, home=home)
    with browsers.opened(browser, path) as page:
        assert page.locator("h1").inner_text() == hostile
        assert page.locator("header a").get_attribute("href") == home
        assert page.title().startswith("</script>")
        assert page.locator("#algorithm option").first.inner_text() == hostile
        assert page.evaluate("[state.algorithm.id, state.devices].join()") == "own,3"
        assert page.locator("#size-text").inner_text() == "1.5 MiB"
        page.locator("body").press("End")
        assert page.locator(".cell.complete").count() == 9


def test_the_page_is_one_small_file_without_addresses(file):
    text = file.read_text(encoding="utf-8")
    assert len(text) < 400_000
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {
        "http://www.w3.org/2000/svg"
    }
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", text) == ["data:,"]


def test_a_page_can_have_more_devices_for_one_algorithm(browser, tmp_path):
    draw.write_page(tmp_path / "ring.html", "ring", 12)
    with browsers.opened(browser, tmp_path / "ring.html") as page:
        assert page.evaluate("[state.algorithm.id, state.devices].join()") == "ring,12"
        page.locator("body").press("End")
        assert page.locator(".cell.complete").count() == 144


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "rings"}, "Did you mean 'ring'"),
        ({"schedule": "hierarchical", "devices": 3}, "an even number"),
        ({"hardware": "h1000"}, "Did you mean 'h100'"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        draw.write_page(tmp_path / "page.html", **given)
    assert not (tmp_path / "page.html").exists()
