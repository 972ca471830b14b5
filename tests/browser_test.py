"""The browser of other tests sees what is wrong with a page, and says what it needs."""

import shutil

import pytest

from tests import browser as browsers

TROUBLE = """<!doctype html><title>trouble</title>
<script>console.warn("a warning"); setTimeout(() => { throw new Error("thrown"); });
Promise.reject(new Error("rejected"));</script>
<img src="missing.png"><img src="https://example.com/remote.png">
<div id="wide" style="width: 900px">wide</div>"""


@browsers.needs_browser()
def test_a_page_that_complains_fails_and_a_quiet_one_does_not(tmp_path):
    (tmp_path / "bad.html").write_text(TROUBLE, encoding="utf-8")
    (tmp_path / "good.html").write_text(
        "<title>good</title><p id=a>a", encoding="utf-8"
    )
    with browsers.started() as browser:
        with (
            pytest.raises(AssertionError) as error,
            browsers.opened(browser, tmp_path / "bad.html", width=390) as page,
        ):
            assert browsers.too_wide(page) == ["div#wide.null"]
        with browsers.opened(
            *(browser, tmp_path / "good.html"), fragment="a", scheme="dark"
        ) as page:
            assert page.url.endswith("good.html#a")
            dark = "matchMedia('(prefers-color-scheme: dark)').matches"
            assert page.evaluate(dark)
            assert browsers.too_wide(page) == []
    message = str(error.value)
    assert "console warning: a warning" in message
    assert "threw thrown" in message
    assert "threw rejected" in message
    assert f"no answer from {(tmp_path / 'missing.png').as_uri()}" in message
    assert "asked the network for https://example.com/remote.png" in message


def test_a_missing_browser_is_skipped_but_not_in_ci(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt install chromium" in browsers.missing()
    monkeypatch.delenv("CI", raising=False)
    (skipped,) = browsers.needs_browser().mark.args
    assert skipped
    monkeypatch.setenv("CI", "true")
    (skipped,) = browsers.needs_browser().mark.args
    assert not skipped
    with pytest.raises(RuntimeError, match="apt install chromium"):
        browsers.started().__enter__()
