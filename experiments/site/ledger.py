"""The ledger of all claims as the site shows it, and what there is without it."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.harness.reading import Found
from experiments.harness.result import KEYS, Document, Rows

NAME = "claims"  # the experiment that judges all claims: its page is the ledger
TABLE = "ledger"
LINK = re.compile(r"\.\./(\w+)/report\.html(?:#(\w+))?")


class Evidence(NamedTuple):
    """Where a claim was tested; no `href` if that is not on the site."""

    experiment: str
    href: str
    others: str


def claims(document: Document | None) -> Rows:
    """All claims of a result; of the ledger those without a verdict too."""
    if document is None:
        return []
    rows = _rows(document)
    return [{key: row.get(key, "") for key in KEYS["claim"]} for row in rows] or [
        *document["claims"]
    ]


def verdicts(found: Rows) -> Counter[str]:
    """How many claims have each verdict."""
    return Counter(str(claim["verdict"]) for claim in found)


def evidence(
    document: Document | None, found: Mapping[str, Found]
) -> dict[str, Evidence]:
    """Where each claim of the ledger was tested, with links to pages of the site."""
    rows = _rows(document) if document else []
    return {str(row.get("id")): _evidence(row, found) for row in rows}


def of_experiments(
    found: Mapping[str, Found],
) -> list[tuple[str, Mapping[str, Any]]]:
    """The claims of all experiments, with their names, by id."""
    every = [
        (name, claim)
        for name, one in found.items()
        for claim in (one.document["claims"] if one.document else [])
    ]
    return sorted(every, key=lambda each: _order(each[1]["id"]))


def _rows(document: Document) -> Rows:
    own = document["experiment"] == NAME
    return document["tables"].get(TABLE, []) if own else []


def _order(name: str) -> tuple[str, int, str]:
    """CA2 before CA10, and CA16 before CB1."""
    parts = re.fullmatch(r"(\D*)(\d{1,9})", name)
    return (parts[1], int(parts[2]), name) if parts else (name, 0, name)


def _evidence(row: Mapping[str, Any], found: Mapping[str, Found]) -> Evidence:
    link = LINK.fullmatch(str(row.get("link", "")))
    name, anchor = link.groups() if link else ("", "")
    document = found[name].document if name in found else None
    href = f"{name}.html" if document else ""
    if document and anchor in {claim["id"] for claim in document["claims"]}:
        href += f"#{anchor}"
    return Evidence(str(row.get("evidence", "")), href, str(row.get("others") or ""))
