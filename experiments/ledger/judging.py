"""Judges claims by the evidence that was gathered: a row of the ledger for each.

Numbers, verdict and reason are those of the experiment that counts, the first of the
claim's that has a result. Where others disagree, or the first has none, the row says so
and why.
"""

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from experiments.harness.result import Claim, Document, Rows
from experiments.ledger.catalogue import Entry
from experiments.ledger.gathering import Evidence

NONE = "no verdict"
VERDICTS = ("holds", "partly", "refuted")
Gathered = Mapping[str, Evidence]


class Judged(NamedTuple):
    """A claim and what became of it.

    Attributes:
        entry: The claim.
        by: What counts; None if there is nothing to go by.
        found: What that says; None with it.
        others: What else testifies, by experiment.
        failed: Experiments of the claim that ran and failed.
        silent: Whether there is nothing to go by, though an experiment has a result.
        note: Why something else, or nothing, counts, and why verdicts differ.
    """

    entry: Entry
    by: Evidence | None
    found: Document | None
    others: dict[str, Document]
    failed: list[Evidence]
    silent: bool
    note: str

    @property
    def verdict(self) -> str:
        """Whether it holds; `NONE` if there is nothing to go by."""
        return self.found["verdict"] if self.found else NONE


def judge(entry: Entry, gathered: Gathered) -> Judged:
    """Finds what counts for one claim."""
    evidence = [gathered[name] for name in entry.evidence]
    said = {each.name: each.claim(entry.id) for each in evidence}
    heard = {name: claim for name, claim in said.items() if claim}
    failed = [each for each in evidence if each.how == "failed"]
    if not heard:
        note = " ".join(_reason(each) for each in evidence)
        silent = any(each.document for each in evidence)
        return Judged(entry, None, None, {}, failed, silent, note)
    by, *rest = heard
    others = {name: heard[name] for name in rest}
    before = evidence[: entry.evidence.index(by)]
    note = " ".join(_notes(entry, gathered[by], heard[by], before, others))
    return Judged(entry, gathered[by], heard[by], others, failed, False, note)


def claims(judged: Iterable[Judged]) -> list[Claim]:
    """All that have a verdict."""
    return [
        Claim(
            id=each.entry.id,
            claim=each.entry.text,
            expected=each.found["expected"],
            measured=each.found["measured"],
            unit=each.found["unit"],
            verdict=each.found["verdict"],
            why=_why(each),
        )
        for each in judged
        if each.found
    ]


def ledger(judged: Iterable[Judged], folder: pathlib.Path) -> Rows:
    """A row for each claim.

    Args:
        judged: The claims.
        folder: Where the page lies that links to the evidence.
    """
    return [_row(each, folder) for each in judged]


def summary(judged: Iterable[Judged]) -> Rows:
    """How many claims of each document have which verdict."""
    rows = {}
    for each in judged:
        document = f"document {each.entry.id[1]}"
        row = rows.setdefault(document, dict.fromkeys((*VERDICTS, NONE), 0))
        row[each.verdict] += 1
    both = {
        verdict: sum(row[verdict] for row in rows.values())
        for verdict in (*VERDICTS, NONE)
    }
    rows["together"] = both
    return [
        {"claims of": name, "claims": sum(row.values()), **row}
        for name, row in rows.items()
    ]


def sources(gathered: Gathered) -> Rows:
    """What every experiment gave, and how old it is."""
    return [_source(each) for each in gathered.values()]


def failures(judged: Iterable[Judged]) -> list[str]:
    """What failed, with the claims that miss it, an experiment each."""
    missed: dict[str, list[str]] = {}
    for each in judged:
        for failed in each.failed:
            reason = f"the experiment {failed.name} {failed.note}"
            missed.setdefault(reason, []).append(each.entry.id)
        if each.silent:
            missed.setdefault(f"no verdict. {each.note}", []).append(each.entry.id)
    return [f"{', '.join(ids)}: {reason}" for reason, ids in missed.items()]


def _notes(
    entry: Entry,
    by: Evidence,
    found: Document,
    before: Iterable[Evidence],
    others: Mapping[str, Document],
) -> Iterator[str]:
    """What is to be said on the evidence that counts, beside what it says itself."""
    for each in before:
        yield f"This is not by {each.name}, as it should be. {_reason(each)}"
    if by.note:
        yield by.note
    differ = {n: c for n, c in others.items() if c["verdict"] != found["verdict"]}
    if differ:
        says = _in_words(differ)
        yield f"Elsewhere the verdict differs ({says}); {by.name} counts:"
        yield entry.weighs


def _row(each: Judged, folder: pathlib.Path) -> dict[str, Any]:
    entry, found = each.entry, each.found or {}
    link = ""
    if each.by:
        page = os.path.relpath(each.by.folder / "report.html", folder)
        link = f"{pathlib.Path(page).as_posix()}#{entry.id}"
    return {
        "id": entry.id,
        "claim": entry.text,
        "expected": found.get("expected", ""),
        "measured": found.get("measured", ""),
        "unit": found.get("unit", ""),
        "verdict": each.verdict,
        "why": _why(each),
        "evidence": each.by.name if each.by else entry.evidence[0],
        "link": link,
        "others": _in_words(each.others),
    }


def _why(each: Judged) -> str:
    """The reason, and what else there is to say."""
    reason = each.found["why"] if each.found else ""
    return " ".join(filter(None, [reason, each.note]))


def _in_words(others: Mapping[str, Document]) -> str:
    """What else testifies."""
    return "; ".join(f"{name}: {claim['verdict']}" for name, claim in others.items())


def _reason(evidence: Evidence) -> str:
    """Why an experiment says nothing on a claim."""
    if evidence.how == "failed":
        return f"{evidence.name} failed."
    if evidence.document:
        return f"The result of {evidence.name} says nothing on it."
    return evidence.note


def _source(evidence: Evidence) -> dict[str, Any]:
    document = evidence.document or {"environment": {}, "config": {}}
    environment = document["environment"]
    return {
        "experiment": evidence.name,
        "how": evidence.how,
        "tiny": document["config"].get("tiny"),
        "commit": (environment.get("commit") or "")[:7],
        "date": environment.get("date", ""),
        "devices": f"{environment['devices']} x {environment['device_kind']}"
        if environment
        else "",
        "ran_s": round(evidence.seconds, 1) if evidence.seconds else None,
        "note": evidence.note.partition("\n")[0],
    }
