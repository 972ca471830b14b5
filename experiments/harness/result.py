"""What an experiment found, and the file it goes to: `result.json`."""

import dataclasses
import datetime
import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["holds", "partly", "refuted"]
Rows = Sequence[Mapping[str, Any]]
Document = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the articles and what became of it.

    Attributes:
        id: Such as "CB1".
        claim: What is claimed.
        expected: What the claim predicts here.
        measured: What was measured.
        unit: Of both; empty if they are words.
        verdict: "holds", "partly" or "refuted".
        why: What was measured how, and what the verdict rests on.
    """

    id: str
    claim: str
    expected: float | str
    measured: float | str
    unit: str
    verdict: Verdict
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What `run(config)` of an experiment returns.

    Attributes:
        claims: The claims it covers.
        tables: Rows by name of the table; a column `label`, the same in all rows, is
            shown below the table.
        figures: Figures by title.
        programs: Compiled programs by name.
        files: Texts of other files, by file name.
        unprinted: Tables too long for the terminal; the report has them.
        failures: What could not be found out, and why: the command then ends with
            status 1, after everything else is written.
    """

    claims: Sequence[Claim]
    tables: Mapping[str, Rows] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, "Figure"] = dataclasses.field(default_factory=dict)
    programs: Mapping[str, jax.stages.Compiled] = dataclasses.field(
        default_factory=dict
    )
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unprinted: Sequence[str] = ()
    failures: Sequence[str] = ()


KEYS = {
    "": {
        "experiment": str,
        "question": str,
        "config": dict,
        "environment": dict,
        "claims": list,
        "tables": dict,
        "artifacts": list,
    },
    "environment": {
        "jax": str,
        "platform": str,
        "device_kind": str,
        "devices": int,
        "commit": str | None,
        "date": str,
    },
    "claim": {
        "id": str,
        "claim": str,
        "expected": int | float | str,
        "measured": int | float | str,
        "unit": str,
        "verdict": str,
        "why": str,
    },
}


def environment(devices: int) -> Document:
    """Where and when an experiment runs."""
    return {
        "jax": jax.__version__,
        "platform": jax.devices()[0].platform,
        "device_kind": jax.devices()[0].device_kind,
        "devices": devices,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """The commit this code is at; None outside a git checkout."""
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return asked.stdout.strip() or None


def validate(document: Document) -> Document:
    """Checks a document against the format of `result.json`.

    Raises:
        ValueError: Names everything that is wrong.
    """
    wrong = problems(document)
    if wrong:
        raise ValueError(
            f"result.json of {document.get('experiment')!r} would be malformed: "
            f"{'; '.join(wrong)}. Correct what the experiment's run() returns."
        )
    return document


def problems(document: Any) -> list[str]:
    """Everything by which a document has not the format of `result.json`."""
    wrong = _wrong_keys("", document)
    if wrong:
        return wrong
    wrong += _wrong_keys("environment", document["environment"])
    for claim in document["claims"]:
        wrong += _wrong_keys("claim", claim) or _wrong_verdict(claim)
    return wrong + [
        f"table {name!r} is no list of rows"
        for name, rows in document["tables"].items()
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows)
    ]


def write(path: pathlib.Path, document: Document) -> None:
    """Writes a valid document; not-a-number is refused, since JSON has none."""
    text = json.dumps(validate(document), indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _wrong_keys(name: str, part: Any) -> list[str]:
    """What is missing, superfluous or of another type in one part of a document."""
    if not isinstance(part, dict):
        return [f"{name or 'it'} is {part!r}, and no object with keys"]
    where = f"{name}." if name else ""
    expected = KEYS[name]
    wrong = [f"{where}{key} is missing" for key in expected if key not in part]
    wrong += [f"{where}{key} is not part of it" for key in part if key not in expected]
    wrong += [
        f"{where}{key} is {part[key]!r}"
        for key, kind in expected.items()
        if key in part and not isinstance(part[key], kind)
    ]
    return wrong


def _wrong_verdict(claim: Document) -> list[str]:
    """A verdict that is none."""
    verdicts = get_args(Verdict)
    if claim["verdict"] in verdicts:
        return []
    return [
        f"claim {claim['id']} has verdict {claim['verdict']!r}; it must be one of "
        f"{', '.join(verdicts)}"
    ]
