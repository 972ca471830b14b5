"""The pages of the documentation: their code runs and prints what they say."""

import contextlib
import io
import itertools
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Their code has tests of its own, for each page or each folder.
ELSEWHERE = {
    *("algorithms.md", "checkpoints.md", "ddp.md", "hosts.md", "programs.md"),
    *("zero.md", "how-to", "tutorials", "_build"),
}
PAGES = sorted(
    page.relative_to(DOCS)
    for page in DOCS.rglob("*.md")
    if page.relative_to(DOCS).parts[0] not in ELSEWHERE
    and "```python" in page.read_text()
)


def blocks(page):
    """What stands in fences, in pairs of language and text."""
    return BLOCK.findall(page.read_text())


def printed_by(code, names, where):
    """Runs code as a page would, and gives back what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, where, "exec"), names)
    return out.getvalue()


def matches(said, printed):
    """Whether a page says what was printed; "…" stands for anything."""
    pattern = ".*?".join(map(re.escape, said.strip().split("…")))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_large_figures_of_tables_are_printed_by_the_code(page):
    printed = " ".join(text for kind, text in blocks(DOCS / page) if kind == "text")
    figures = {*re.findall(r"\d+", printed.replace(",", ""))}
    for row in re.findall(r"^\|.*\|$", (DOCS / page).read_text(), re.MULTILINE):
        for figure in re.findall(r"\d{1,3}(?:,\d{3})+", row):
            assert figure.replace(",", "") in figures, row


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_code_of_a_page_runs_and_prints_what_it_says(page):
    names = {"__name__": "__main__"}
    fenced = [*blocks(DOCS / page), ("", "")]
    for (language, code), (following, said) in itertools.pairwise(fenced):
        if language != "python":
            continue
        printed = printed_by(code, names, str(page))
        if following == "text":
            assert matches(said, printed), f"{said}\nwas printed as\n{printed}"
