"""The history of benchmarks: `history.json`, one record per run.

A run is written after every row, so that an interrupted one keeps what it measured.
Every change reads the file anew, under a lock, and replaces it in one step: runs that
write at once keep each other's rows, and a reader sees a whole file or none. A file
that cannot be used, of an older format or cut off, is moved aside, never written over.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any

from benchmarks.rows import Row

try:
    import fcntl
except ImportError:  # Windows: whoever writes last keeps the rows of both
    fcntl = None

FORMAT = 1
FACTS = {
    "id": str,
    "commit": str | None,
    "committed": str | None,
    "dirty": bool,
    "date": str,
    "complete": bool,
    "jax": str,
    "python": str,
    "platform": str,
    "device_kind": str,
    "cores": int,
    "cpu": str,
    "rows": list,
    "failed": list,
}
Run = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class History:
    """The records of a file.

    Attributes:
        path: The file; its folder is made when something is written.
    """

    path: pathlib.Path

    def runs(self) -> list[Run]:
        """All runs, in the order in which they were first written; none without a file.

        A file that cannot be used is left where it is and counts as none.
        """
        found, _ = self._read()
        return found

    def keep(self, run: Run) -> str:
        """Writes a run, in place of what was written of it before.

        Returns:
            What happened to a file that could not be used; empty if nothing did.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            runs, problem = self._read()
            moved = self._moved_aside(problem) if problem else ""
            places = [i for i, other in enumerate(runs) if other["id"] == run["id"]]
            if places:
                runs[places[0]] = run
            else:
                runs.append(run)
            self._replace({"format": FORMAT, "runs": runs})
        return moved

    def _read(self) -> tuple[list[Run], str]:
        """The runs, and why they cannot be used."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return [], ""
        try:
            document = json.loads(text)
        except ValueError as error:
            return [], f"is no JSON ({error})"
        problem = _problem(document)
        return ([], problem) if problem else (document["runs"], "")

    def _moved_aside(self, problem: str) -> str:
        """Moves the file to the first free name beside it."""
        number = 1
        while (aside := self.path.with_suffix(f".aside-{number}.json")).exists():
            number += 1
        self.path.rename(aside)
        return (
            f"{self.path} {problem}. A new history begins; the old file is {aside}, "
            "untouched. Delete it, or read it with the version that wrote it."
        )

    def _replace(self, document: dict[str, Any]) -> None:
        """Puts a new file in the place of the old one, complete or not at all."""
        new = self.path.with_suffix(f".{uuid.uuid4().hex}.new")
        try:
            with new.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=1, allow_nan=False, ensure_ascii=False)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time; the system unlocks for a process that dies."""
        with self.path.with_suffix(".lock").open("w") as file:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def begun(code: dict[str, Any], machine: dict[str, Any], date: str) -> Run:
    """A run without rows."""
    about = {"id": uuid.uuid4().hex, "date": date, "complete": False}
    return {**about, **code, **machine, "rows": [], "failed": []}


def written(row: Row) -> dict[str, Any]:
    """A row as JSON has it."""
    fields = dataclasses.asdict(row)
    return {**fields, "quartiles": [*row.quartiles], "holds": row.holds}


def _problem(document: Any) -> str:
    """Why a document is no history; empty if it is one."""
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        return f"has format {found!r}, and this version reads and writes {FORMAT}"
    runs = document.get("runs")
    if not isinstance(runs, list):
        return "has no list of runs"
    for index, run in enumerate(runs):
        wrong = [
            fact
            for fact, kind in FACTS.items()
            if not isinstance(run, dict)
            or fact not in run
            or not isinstance(run[fact], kind)
        ]
        if wrong:
            return f"has a run, number {index}, without a right {', '.join(wrong)}"
        for row in run["rows"]:
            try:
                read(row)
            except (TypeError, KeyError, ValueError) as error:
                return f"has a malformed row in run {index} ({error!r})"
    return ""


def read(row: dict[str, Any]) -> Row:
    """The row that was written.

    Raises:
        KeyError: Something is missing.
        TypeError: The value or a quartile is no number.
    """
    fields = {field.name: row[field.name] for field in dataclasses.fields(Row)}
    first, third = row["quartiles"]
    for number in (row["value"], first, third):
        if not isinstance(number, int | float):
            raise TypeError(f"{row['name']} has {number!r} where a number belongs")
    return Row(**{**fields, "quartiles": (first, third)})
