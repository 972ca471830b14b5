"""Results that no experiment has made, to be read by what reads results."""

import json
import pathlib
from typing import Any

from experiments.harness import result


def claim(claim_id: str, verdict: str = "holds", **changes: Any) -> dict[str, Any]:
    """A claim as `result.json` has it."""
    usual = {"claim": f"{claim_id} is so", "expected": 2, "measured": 2.0, "unit": "s"}
    why = {"why": f"{claim_id} was seen."}
    return {"id": claim_id, "verdict": verdict} | usual | why | changes


def write(
    results: pathlib.Path,
    name: str,
    *claims: dict[str, Any],
    commit: str | None = None,
    tiny: bool = False,
    **changes: Any,
) -> pathlib.Path:
    """Writes the result of an experiment; returns its folder.

    Args:
        results: The folder of all results.
        name: Of the experiment.
        claims: As `claim` makes them.
        commit: It is of; None is of no checkout, so that it is never older.
        tiny: Whether it is of a tiny run.
        changes: Other keys of the document.
    """
    document = {
        "experiment": name,
        "question": "Is it so?",
        "config": {"devices": 1, "tiny": tiny},
        "environment": result.environment(1) | {"commit": commit},
        "claims": [*claims],
        "tables": {"rows": [{"a": 1}]},
        "artifacts": ["report.html"],
    }
    folder = results / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text("<html>")
    (folder / "result.json").write_text(json.dumps(document | changes))
    return folder
