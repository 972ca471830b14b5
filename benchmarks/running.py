"""One run: cases in turn, every row kept as soon as it is there."""

import dataclasses
import traceback
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks import changes, history, machine
from benchmarks.case import Case
from benchmarks.history import History, Run
from benchmarks.rows import Row


@dataclasses.dataclass
class Running:
    """A run under way.

    Attributes:
        kept: Where its rows go, at once.
        seconds: How long each benchmark goes on.
        run: Its record so far.
        say: Prints a line.
    """

    kept: History
    seconds: float
    run: Run
    say: Callable[[str], None] = Console(markup=False, soft_wrap=True).print

    def measure(self, cases: Sequence[Case]) -> Run:
        """Runs the cases; returns the record, which is complete then.

        A row that looks slower than usual, or passes its limit, is measured once more
        before it is kept, and the better one counts: what is slow by chance seldom is
        so twice. Rows of `long` cases are not: a second compilation of the same program
        is none. A case that fails is named, and the others go on.
        """
        for number, case in enumerate(cases, 1):
            why = case.missing()
            note = f": not here: {why}" if why else ""
            self.say(f"[{number}/{len(cases)}] {case.name}{note}")
            if not why:
                self._try(case)
        self.run["complete"] = True
        self._keep()
        return self.run

    def _try(self, case: Case) -> None:
        """Measures one case, or says why it fails."""
        try:
            rows = self._measured(case)
        except Exception as error:
            traceback.print_exc()
            first = str(error).partition("\n")[0]  # all of it is on the terminal
            why = f"{type(error).__name__}: {first}"
            self.run["failed"].append({"name": case.name, "error": why})
        else:
            self.run["rows"] += map(history.written, rows)
        self._keep()

    def _measured(self, case: Case) -> list[Row]:
        """The rows of a case; where one is doubtful, the better ones of two runs."""
        rows = list(case.measured(self.seconds))
        if case.long or not any(map(self._doubtful, rows)):
            return rows
        self.say("  slower than usual, or over its limit: measured again")
        again = case.measured(self.seconds)
        return [
            min(pair, key=lambda row: row.value)
            for pair in zip(rows, again, strict=True)
        ]

    def _doubtful(self, row: Row) -> bool:
        """Whether a row would be judged as slower, or passes its limit."""
        tried = {**self.run, "rows": [history.written(row)]}
        others = [run for run in self.kept.runs() if run["id"] != tried["id"]]
        (change,) = changes.of_run([*others, tried], tried)
        return change.verdict == "slower" or not row.holds

    def _keep(self) -> None:
        """Writes the run as it is."""
        if moved := self.kept.keep(self.run):
            self.say(moved)


def begin(kept: History, seconds: float) -> Running:
    """A run of this code on this machine, now."""
    run = history.begun(machine.code(), machine.facts(), machine.now())
    return Running(kept, seconds, run)
