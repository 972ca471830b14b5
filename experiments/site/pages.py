"""The pages of the site."""

import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

from experiments.harness import reading, registry, result, templates
from experiments.harness.reading import Found
from experiments.site import designs, files, ledger, overview

HERE = pathlib.Path(__file__).parent
INDEX, STEPS, STYLE = "index.html", "step.html", "look.css"
NUMBERS = "designs.csv"
UNWRITABLE = "backslashreplace"  # half of a surrogate pair, which JSON can have
STATES = ("current", "older", "damaged", "missing")


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
        "ledger": ledger.NAME,
        "states": STATES,
    }
    style = environment.get_template("site.css").render()
    (site / STYLE).write_text(style, encoding="utf-8")
    panels = overview.panels(found)
    (site / NUMBERS).write_text(overview.as_csv(panels), encoding="utf-8")
    pages = {INDEX: _index(found, panels, results)}
    for name in found:
        pages[f"{name}.html"] = _experiment(name, found, results, site)
    for file, given in pages.items():
        template = "index.html.j2" if file == INDEX else "experiment.html.j2"
        text = environment.get_template(template).render(here=file, **given)
        (site / file).write_text(text, encoding="utf-8", errors=UNWRITABLE)
    return found


def _index(
    found: Mapping[str, Found], panels: list[overview.Panel], results: pathlib.Path
) -> dict[str, Any]:
    """What the first page shows."""
    groups: dict[str, list[overview.Panel]] = {}
    for panel in panels:
        groups.setdefault(panel.measure.group, []).append(panel)
    return {
        "groups": groups,
        "designs": overview.designs(panels),
        "panels": [panel for panel in panels if panel.numbers],
        "commands": {name: reading.command(results, name) for name in found},
        "questions": {name: registry.question(name) for name in found},
        "verdicts": ledger.verdicts(ledger.claims(found[ledger.NAME].document)),
        "numbers": NUMBERS,
        "commit": result.commit(),
    }


def _experiment(
    name: str, found: Mapping[str, Found], results: pathlib.Path, site: pathlib.Path
) -> dict[str, Any]:
    """What the page of an experiment shows."""
    names = [*found]
    place = names.index(name)
    document = found[name].document
    claims = ledger.claims(document)
    question, _, about = registry.docstring(name).partition("\n")
    tables = dict(document["tables"]) if document else {}
    if name == ledger.NAME:
        tables.pop(ledger.TABLE, None)  # its rows are the claims
    return {
        "name": name,
        "own": found[name],
        "document": document,
        "question": document["question"] if document else question,
        "about": about.strip(),
        "tables": tables,
        "claims": claims,
        "evidence": ledger.evidence(document, found),
        "verdicts": ledger.verdicts(claims),
        "judged": ledger.of_experiments(found)
        if not claims and name == ledger.NAME
        else [],
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
