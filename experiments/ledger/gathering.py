"""Collects the results that claims are judged by: reads them, or has them made.

A tiny run never replaces a full result: where an older one lies, it goes to
`OUTPUT/tiny/NAME`. A full one that is current counts in a tiny ledger, too.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

from experiments.harness import reading, registry, show
from experiments.harness.result import Document
from experiments.ledger import running, sources
from experiments.ledger.catalogue import Entry

TINY, LOGS = "tiny", "logs"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is there of one experiment.

    Attributes:
        name: Of the experiment.
        document: Of its `result.json`; None if there is none to go by.
        folder: Where that lies.
        how: Whether it was read, has run, failed, or is not there.
        note: What a reader must know: that it is older, what this machine lacked for
            it, or why it is not there.
        seconds: That it ran.
    """

    name: str
    document: Document | None
    folder: pathlib.Path
    how: Literal["read", "ran", "failed", "not there"]
    note: str
    seconds: float = 0.0

    def claim(self, claim_id: str) -> Document | None:
        """What it says on a claim; None if nothing."""
        claims = self.document["claims"] if self.document else []
        return next((claim for claim in claims if claim["id"] == claim_id), None)


@dataclasses.dataclass(frozen=True)
class Wish:
    """What is to be gathered, and where.

    Attributes:
        entries: The claims.
        results: The folder of all results.
        platform: That experiments run on.
        tiny: Whether they run in tiny form.
        fresh: Whether they run also where a current result is there.
        all_claims: Whether that is all claims: then quick witnesses run, too.
    """

    entries: Sequence[Entry]
    results: pathlib.Path
    platform: str
    tiny: bool
    fresh: bool
    all_claims: bool


def gather(wish: Wish) -> dict[str, Evidence]:
    """All evidence on the claims, by experiment."""
    names = dict.fromkeys(name for entry in wish.entries for name in entry.evidence)
    wanted = sources.to_run(wish.entries, wish.all_claims)
    found = {} if wish.fresh else {name: _current(wish, name) for name in wanted}
    jobs = [_job(wish, name) for name in wanted if not found.get(name)]
    _tell(wish, [name for name in wanted if found.get(name)], jobs)
    ended = running.run_all(jobs, at_once=2 if wish.tiny else 1) if jobs else {}
    gathered = {}
    for name in names:
        if name in ended:
            gathered[name] = _after(wish, name, ended[name])
        else:
            gathered[name] = _read(wish, name)
    return gathered


def _tell(wish: Wish, read: Sequence[str], jobs: Sequence[running.Job]) -> None:
    """Says what is read and what will run, and what this machine lacks for it."""
    if read:
        show.console.print(f"read: {', '.join(read)}")
    if jobs:
        minutes = sum(sources.SOURCES[job.name].minutes for job in jobs)
        about = "tiny" if wish.tiny else f"about {minutes:.0f} min on two idle cores"
        names = ", ".join(job.name for job in jobs)
        show.console.print(f"to be run, {about}: {names}")
    for lack in dict.fromkeys(sources.lack(job.name) for job in jobs):
        if lack:
            show.console.print(lack, markup=False)


def _job(wish: Wish, name: str) -> running.Job:
    """How one experiment is run."""
    size = ["--tiny"] if wish.tiny else sources.SOURCES[name].options
    where = ["--platform", wish.platform, "--output", str(_output(wish, name))]
    log = wish.results / LOGS / f"{name}.txt"
    return running.Job(name, [*size, *where], log)


def _output(wish: Wish, name: str) -> pathlib.Path:
    """Where an experiment writes: a tiny run elsewhere than a full result."""
    there = reading.find(wish.results, name)
    kept = wish.tiny and there.document is not None and not there.tiny
    return wish.results / TINY if kept else wish.results


def _current(wish: Wish, name: str) -> reading.Found | None:
    """A result of today's code, and a full one unless a tiny one will do."""
    for place in [wish.results, wish.results / TINY][: 1 + wish.tiny]:
        found = reading.find(place, name)
        if found.state == "current" and (wish.tiny or not found.tiny):
            return found
    return None


def _read(wish: Wish, name: str) -> Evidence:
    """What is there of an experiment that has not run now."""
    if name not in registry.names():
        folder = wish.results / name
        return Evidence(name, None, folder, "not there", sources.absent(name))
    found = _current(wish, name) or reading.find(wish.results, name)
    if found.document and (wish.tiny or not found.tiny):
        older = found.note if found.state == "older" else ""
        return Evidence(name, found.document, found.folder, "read", older)
    note = sources.absent(name) or found.note
    return Evidence(name, None, found.folder, "not there", note)


def _after(wish: Wish, name: str, ended: running.Ended) -> Evidence:
    """What an experiment that has run has left."""
    found = reading.find(_output(wish, name), name)
    failure = ended.failure or (found.note if found.document is None else "")
    if failure:
        return Evidence(name, None, found.folder, "failed", failure, ended.seconds)
    lack = sources.lack(name)
    return Evidence(name, found.document, found.folder, "ran", lack, ended.seconds)
