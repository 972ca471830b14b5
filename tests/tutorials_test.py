"""The tutorials run, print what they say, and their notebooks are made of them."""

import json
import re

import jax
import pytest

from tests.docs_code_test import DOCS, matches, printed_by

CELL = re.compile(
    r"^```\{code-cell\}\n(?P<code>.*?)^```\n(?:\n```text\n(?P<said>.*?)^```\n)?",
    re.M | re.S,
)
TUTORIALS = sorted(p for p in DOCS.glob("tutorials/*.md") if p.stem != "index")
over_tutorials = pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)


@pytest.fixture(autouse=True)
def _started(monkeypatch):
    """JAX has started here: the first cell finds its settings made."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with jax.numpy_rank_promotion("allow"):
        yield


@over_tutorials
def test_cells_run_and_print_what_the_page_says(page):
    names = {"__name__": "__main__"}
    cells = [*CELL.finditer(page.read_text())]
    assert len(cells) > 8
    for cell in cells:
        printed, said = printed_by(cell["code"], names, page.name), cell["said"] or ""
        assert matches(said, printed), f"{said}\nwas printed as\n{printed}"


@over_tutorials
def test_the_notebook_is_made_of_the_page(page):
    """`jupytext --update --to ipynb docs/tutorials/*-*.md` makes them."""
    import jupytext

    made = jupytext.read(page)
    kept = json.loads(page.with_suffix(".ipynb").read_text())
    expected = [(cell.cell_type, cell.source) for cell in made.cells]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in kept["cells"]]
    assert found == expected
    assert [*kept["metadata"]] == ["kernelspec"]
    assert not any(cell.get("outputs") for cell in kept["cells"])
