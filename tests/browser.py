"""A real browser for tests of pages: Debian's Chromium, driven by Playwright.

A page is shown from its file, with no network, and must do so without a complaint:
`opened` fails on any error or warning in the console, uncaught exception, failed
request, or request for something that is no file.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Git does not track them: they are there to be looked at.
SCREENSHOTS = pathlib.Path(__file__).parents[1] / "results" / "screenshots"
LOCAL = ("file:", "data:", "blob:", "about:")
TIMEOUT_MS = 10_000  # of anything that a test waits for
# Root may not use the sandbox, and containers have little shared memory.
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
_WIDER = """() => {
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= room) return [];
  return [...document.body.querySelectorAll("*")]
    .filter((e) => e.getBoundingClientRect().right > room + 0.5)
    .map((e) => `${e.tagName.toLowerCase()}#${e.id}.${e.getAttribute("class")}`);
}"""


def missing() -> str:
    """What lacks for a browser and how to install it; empty if nothing does."""
    problems = []
    if not any(map(shutil.which, NAMES)):
        problems.append(
            f"no browser is on the PATH: none of {', '.join(NAMES)}. Install it: "
            "apt install chromium."
        )
    if importlib.util.find_spec("playwright") is None:
        problems.append(
            "Playwright, which drives the browser, is not installed. Install it: "
            "pip install playwright."
        )
    return " ".join(problems)


def needs_browser() -> pytest.MarkDecorator:
    """Skips a test where there is no browser; never in CI.

    There the test runs and fails, so that a broken installation is seen.
    """
    problem = missing()
    return pytest.mark.skipif(
        bool(problem) and not os.environ.get("CI"), reason=problem
    )


@contextlib.contextmanager
def started() -> Iterator["Browser"]:
    """Runs a browser: once per module, in a fixture of module scope.

    Raises:
        RuntimeError: There is none; says how to install it.
    """
    if missing():
        raise RuntimeError(missing())
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=[*FLAGS], timeout=60_000
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    browser: "Browser",
    file: str | os.PathLike,
    *,
    fragment: str = "",
    width: int = 1280,
    height: int = 900,
    scheme: Literal["light", "dark"] = "light",
    reduced_motion: bool = True,
    **context: Any,
) -> Iterator["Page"]:
    """Shows a file in a fresh context, and fails if the page complains of anything.

    Args:
        browser: Of `started`.
        file: An HTML file.
        fragment: What follows `#` in its address.
        width: Of the viewport, in CSS pixels; a phone has 390.
        height: Of the viewport.
        scheme: Which colours the reader prefers.
        reduced_motion: Whether the reader prefers no animations. They take time.
        **context: More of `Browser.new_context`.

    Raises:
        AssertionError: The page wrote an error or a warning, threw, or asked for
            something that is missing or elsewhere.
    """
    address = pathlib.Path(file).resolve(strict=True).as_uri()
    with contextlib.closing(
        browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce" if reduced_motion else "no-preference",
            offline=True,
            **context,
        )
    ) as shown:
        shown.set_default_timeout(TIMEOUT_MS)
        complaints = _listen(shown)
        page = shown.new_page()
        page.goto(f"{address}#{fragment}" if fragment else address)
        yield page
        page.evaluate("0")  # whatever the page has still to say has arrived by then
        assert not complaints, f"{address} complained:\n" + "\n".join(complaints)


def screenshot(page: "Page", name: str, *, whole: bool = True) -> pathlib.Path:
    """Saves what a page looks like to `results/screenshots/NAME.png`.

    Args:
        page: Of `opened`.
        name: Without folder and suffix.
        whole: The whole page, or only what the viewport shows.
    """
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path, full_page=whole, animations="disabled")
    return path


def too_wide(page: "Page") -> list[str]:
    """Elements that reach over the right edge, where the page scrolls sideways."""
    return page.evaluate(_WIDER)


def _listen(context: "BrowserContext") -> list[str]:
    """The complaints of all pages of a context, as they come."""
    complaints: list[str] = []

    def asked(request):
        if not request.url.startswith(LOCAL):
            complaints.append(f"asked the network for {request.url}")

    def said(message):
        if message.type in ("error", "warning"):
            complaints.append(f"console {message.type}: {message.text}")

    context.route(re.compile(f"^(?!{'|'.join(LOCAL)})"), lambda route: route.abort())
    context.on("request", asked)
    context.on("requestfailed", lambda r: complaints.append(f"no answer from {r.url}"))
    context.on("console", said)
    context.on("weberror", lambda error: complaints.append(f"threw {error.error}"))
    return complaints
