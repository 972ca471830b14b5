"""The pages in docs/how-to: their code runs, prints and is refused as they say."""

import contextlib
import io
import re

import jax
import pytest

from tests.docs_code_test import DOCS, matches

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<said>.*?)^```\n)?", re.M | re.S
)
PAGES = sorted(page for page in DOCS.glob("how-to/*.md") if page.stem != "index")


def answer(code, names, where):
    """What code prints, and the error that ends it, if one does."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(code, where, "exec"), names)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return out.getvalue()


def test_answers_tell_errors_from_output():
    assert answer("print(1)\n{}['a']", {}, "") == "1\nKeyError: 'a'\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_a_page_does_what_it_says(page):
    names = {"__name__": "__main__"}
    found = [*BLOCK.finditer(page.read_text())]
    assert len(found) >= 4
    with jax.numpy_rank_promotion("allow"):
        for block in found:
            printed = answer(block["code"], names, page.name)
            said = block["said"] or ""
            same = matches(*(" ".join(text.split()) for text in (said, printed)))
            assert same, f"{page.name} says\n{said}\nand this came:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_tell_what_may_go_wrong(page):
    text = page.read_text()
    assert "## What may go wrong" in text and "Error: " in text
    code = "".join(block["code"] for block in BLOCK.finditer(text))
    assert max(map(len, code.splitlines())) <= 88
