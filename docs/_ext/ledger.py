"""The claims of the two articles and what became of them, from `docs/claims.json`.

`{ledger} refuted` lists the claims with that verdict; `{ledger} counts` says in a
sentence how many have which. The file is the `result.json` of `make experiment
EXP=claims`, as it was last run in full.
"""

import collections
import json
import pathlib

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

CLAIMS = pathlib.Path(__file__).parents[1] / "claims.json"
LOGGER = logging.getLogger(__name__)


class Ledger(SphinxDirective):
    """Every claim is a section that can be linked to, such as `#ca2`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Lists one verdict, or counts all."""
        self.env.note_dependency(str(CLAIMS))
        wanted = self.arguments[0]
        if not CLAIMS.exists():
            warning = (
                "docs/claims.json is missing: run `make experiment EXP=claims`, and "
                "copy results/claims/result.json there"
            )
            LOGGER.warning(warning, location=self.env.docname)
            return [_paragraph(warning)]
        document = json.loads(CLAIMS.read_text())
        rows = document["tables"]["ledger"]
        if wanted == "counts":
            return [_counts(rows, document)]
        chosen = [row for row in rows if row["verdict"] == wanted]
        return [_claim(row) for row in chosen] or [_paragraph("None.")]


def _counts(rows: list[dict], document: dict) -> nodes.Node:
    """How many claims have which verdict, and in which version of the code."""
    found = collections.Counter(row["verdict"] for row in rows)
    commit = str(document["environment"].get("commit", ""))[:10]
    text = (
        f"Of {len(rows)} claims {found['holds']} hold, {found['partly']} hold partly, "
        f"and {found['refuted']} are refuted, measured at commit {commit}."
    )
    if document["config"].get("tiny"):
        text += " This was the tiny form: numbers are those of small models."
    return _paragraph(text)


def _claim(row: dict) -> nodes.Node:
    """One claim: what it says, what was measured, why, and how to check it."""
    title = f"{row['id']} · {row['verdict']}"
    section = nodes.container(ids=[row["id"].lower()], classes=["claim"])
    section["classes"].append(f"verdict-{row['verdict']}")
    section += nodes.paragraph("", "", nodes.strong("", title))
    section += _paragraph(row["claim"])
    unit = f" {row['unit']}" if row["unit"] else ""
    fields = {
        "Claimed": f"{_number(row['expected'])}{unit}",
        "Measured": f"{_number(row['measured'])}{unit}",
        "Why": row["why"],
    }
    if row.get("others"):
        fields["Also"] = row["others"]
    listed = nodes.field_list()
    for name, text in fields.items():
        listed += _field(name, _paragraph(text))
    command = nodes.literal("", f"make experiment EXP={row['evidence']}")
    listed += _field("Check it", nodes.paragraph("", "", command))
    section += listed
    return section


def _field(name: str, body: nodes.Node) -> nodes.field:
    return nodes.field("", nodes.field_name("", name), nodes.field_body("", body))


def _paragraph(text: str) -> nodes.paragraph:
    return nodes.paragraph("", text)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.6g}"


def setup(app: Sphinx) -> dict:
    """Adds the directive."""
    app.add_directive("ledger", Ledger)
    return {"parallel_read_safe": True}
