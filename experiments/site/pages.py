"""The pages of the site."""

import ast
import pathlib
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from experiments.harness import reading, registry, templates
from experiments.harness.reading import Found
from experiments.harness.result import Document, Rows
from experiments.site import designs, files, overview

HERE = pathlib.Path(__file__).parent
INDEX, STEPS, STYLE = "index.html", "step.html", "look.css"
LEDGER = "claims"  # the experiment that judges all claims: its page is the ledger
LINK = re.compile(r"\.\./(\w+)/report\.html(?:#(\w+))?")
UNWRITABLE = "backslashreplace"  # half of a surrogate pair, which JSON can have
STATES = ("current", "older", "damaged", "missing")


class Evidence(NamedTuple):
    """Where a claim of the ledger was tested."""

    experiment: str
    href: str
    others: str


def write(site: pathlib.Path, results: pathlib.Path) -> dict[str, Found]:
    """Writes all pages but that of the steps; returns what they are made of.

    Args:
        site: An empty folder.
        results: The folder of all results.
    """
    found = reading.find_all(results)
    environment = templates.environment(HERE)
    environment.filters |= {"marked": _marked, "anchor": _anchor}
    environment.globals |= {
        "families": designs.FAMILIES,
        "found": found,
        "ledger": LEDGER,
        "states": STATES,
    }
    style = environment.get_template("site.css").render()
    (site / STYLE).write_text(style, encoding="utf-8")
    pages = {INDEX: _index(found, results)}
    for name in found:
        pages[f"{name}.html"] = _experiment(name, found, results, site)
    for file, given in pages.items():
        template = "index.html.j2" if file == INDEX else "experiment.html.j2"
        text = environment.get_template(template).render(here=file, **given)
        (site / file).write_text(text, encoding="utf-8", errors=UNWRITABLE)
    return found


def _index(found: Mapping[str, Found], results: pathlib.Path) -> dict[str, Any]:
    """What the first page shows."""
    panels = overview.panels(found)
    groups: dict[str, list[overview.Panel]] = {}
    for panel in panels:
        groups.setdefault(panel.measure.group, []).append(panel)
    return {
        "groups": groups,
        "designs": overview.designs(panels),
        "panels": [panel for panel in panels if panel.numbers],
        "commands": {name: reading.command(results, name) for name in found},
        "questions": {name: registry.question(name) for name in found},
        "verdicts": _verdicts(found[LEDGER].document if LEDGER in found else None),
    }


def _experiment(
    name: str, found: Mapping[str, Found], results: pathlib.Path, site: pathlib.Path
) -> dict[str, Any]:
    """What the page of an experiment shows."""
    names = [*found]
    place = names.index(name)
    document = found[name].document
    question, about = _described(name)
    tables = dict(document["tables"]) if document else {}
    evidence = {}
    if name == LEDGER:
        evidence = _evidence(tables.pop("ledger", []), found)
    return {
        "name": name,
        "own": found[name],
        "document": document,
        "question": document["question"] if document else question,
        "about": about,
        "tables": tables,
        "evidence": evidence,
        "verdicts": _verdicts(document),
        "judged": _judged(found) if name == LEDGER and not document else [],
        "files": files.copy(found[name], site),
        "command": reading.command(results, name),
        "before": names[place - 1] if place else None,
        "after": names[place + 1] if place + 1 < len(names) else None,
    }


def _marked(note: str) -> Markup:
    """A note as HTML, with what stands between backticks as code."""
    parts = [escape(part) for part in note.split("`")]
    code = Markup("<code>{}</code>")
    return Markup("").join(
        code.format(part) if i % 2 else part for i, part in enumerate(parts)
    )


def _anchor(name: str) -> str:
    """What links to an element of this id have behind the `#`."""
    return urllib.parse.quote(name, errors=UNWRITABLE)


def _described(name: str) -> tuple[str, str]:
    """The question of an experiment, and the rest of its docstring."""
    tree = ast.parse((registry.FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    question, _, about = (ast.get_docstring(tree) or "").partition("\n")
    return question, about.strip()


def _verdicts(document: Document | None) -> dict[str, int]:
    """How many claims hold, hold partly, and are refuted."""
    claims = document["claims"] if document else []
    verdicts = [claim["verdict"] for claim in claims]
    return {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}


def _judged(found: Mapping[str, Found]) -> list[tuple[str, dict[str, Any]]]:
    """The claims of single experiments, by their id."""
    every = [
        (name, claim)
        for name, one in found.items()
        for claim in (one.document["claims"] if one.document else [])
    ]
    return sorted(every, key=lambda each: (len(each[1]["id"]), each[1]["id"]))


def _evidence(rows: Rows, found: Mapping[str, Found]) -> dict[str, Evidence]:
    """Links of the ledger, as pages of the site; none that would lead nowhere."""
    kept = {}
    for row in rows:
        link = LINK.fullmatch(str(row.get("link", "")))
        name, anchor = link.groups() if link else ("", None)
        document = found[name].document if name in found else None
        if not document:
            continue
        anchors = {claim["id"] for claim in document["claims"]}
        href = f"{name}.html" + (f"#{anchor}" if anchor in anchors else "")
        kept[str(row.get("id"))] = Evidence(name, href, str(row.get("others") or ""))
    return kept
