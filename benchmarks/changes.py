"""What got slower: each row against the same row of earlier commits.

Compared are runs of one machine class (`machine.CLASS`). All runs of a commit make one
state of the code, whose value is their median, so that running again settles a doubt; a
run of changed files is a state of its own, and never what others are compared with.
States are in the order of commits, not of runs: an older commit can be measured later.

With c the median of the last 10 commits before, a row is slower if its value passes
both 1.05 c (1.25 c for seconds, which a busy machine stretches) and c + 5 s, and faster
below both c / 1.05 and c - 5 s. s is how far values lie apart by chance, as a standard
deviation: by the distances from c, or by those between neighbours, whichever is
smaller. One slow commit among them widens only the second, a slow drift only the first.
Below 4 commits it is the spread of single pairs within a run, which is wider, and 3 s
count. The chance error of the row's own median is added to s.

Why so: of values that scatter by 2 % (normal), with 4 to 10 commits before, 0.3 to
0.8 % are called slower by chance, before they are measured again; if a row is 15 %
slower, 92 to 95 % of runs show it at once, and at 20 % 98 % and more.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from benchmarks import history, machine
from benchmarks.history import Run
from benchmarks.rows import Row

BEFORE = 10  # commits that are compared with
ENOUGH = 4  # of them, to know how they scatter
TOLERANCE = {"ratio": 1.05, "s": 1.25}
FACTOR, FEW_FACTOR = 5.0, 3.0
PER_IQR = 1 / 1.349  # standard deviation, of a normal distribution
PER_MAD = 1.4826  # likewise, from the median distance
OF_MEDIAN = 1.2533  # standard error of a median, over that of a mean

Verdict = Literal["slower", "faster", "as before", "new"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """A row at one state of the code.

    Attributes:
        code: What tells it from others.
        commit: Its hash; None outside of git.
        dirty: Whether files were changed since.
        committed: When the commit was made; when it ran, outside of git.
        date: When it ran last.
        runs: How many there are.
        row: With medians over those runs.
    """

    code: str
    commit: str | None
    dirty: bool
    committed: str
    date: str
    runs: int
    row: Row

    @property
    def label(self) -> str:
        """Short: the commit's first characters, with + for changed files."""
        return (self.commit or "no git")[:7] + "+" * self.dirty


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A row's state beside the ones before it.

    Attributes:
        state: What is judged.
        verdict: "new" if there is nothing before it.
        usual: Median of the commits before; None if there are none.
        bound: Above it is slower; None likewise.
        before: How many commits that is.
    """

    state: State
    verdict: Verdict
    usual: float | None = None
    bound: float | None = None
    before: int = 0

    @property
    def row(self) -> Row:
        """The row that is judged."""
        return self.state.row

    @property
    def relative(self) -> float | None:
        """By how much it is over the usual value, as a fraction of that."""
        return None if self.usual is None else self.row.value / self.usual - 1


def states(runs: Iterable[Run], name: str) -> list[State]:
    """The states that have a row, in the order of commits.

    Args:
        runs: Of one machine class.
        name: The row's. If its unit has changed, only rows with the last one count.
    """
    kept: dict[str, list[tuple[Run, Row]]] = {}
    unit = None
    for run in runs:
        for found in run["rows"]:
            if found["name"] == name:
                unit = found["unit"]
                kept.setdefault(_code(run), []).append((run, history.read(found)))
    of_unit = ([p for p in pairs if p[1].unit == unit] for pairs in kept.values())
    found = [_state(pairs) for pairs in of_unit if pairs]
    return sorted(found, key=lambda s: (s.committed, s.dirty, s.date))


def judge(found: Sequence[State], index: int) -> Change:
    """Compares one state with the last commits before it."""
    state = found[index]
    before = [other.row for other in found[:index] if not other.dirty][-BEFORE:]
    if not before:
        return Change(state=state, verdict="new")
    value = state.row.value
    usual = statistics.median(row.value for row in before)
    margin, tolerance = _margin(state.row, before, usual), TOLERANCE[state.row.unit]
    bound = max(tolerance * usual, usual + margin)
    verdict: Verdict = "as before"
    if value > bound:
        verdict = "slower"
    elif value < min(usual / tolerance, usual - margin):
        verdict = "faster"
    return Change(
        state=state, verdict=verdict, usual=usual, bound=bound, before=len(before)
    )


def of_run(runs: Sequence[Run], run: Run) -> list[Change]:
    """Judges every row of one of the runs, in the order in which they were measured."""
    like = [other for other in runs if machine.alike(other) == machine.alike(run)]
    changes = []
    for row in run["rows"]:
        found = states(like, row["name"])
        changes.append(judge(found, index_of(found, run)))
    return changes


def index_of(found: Sequence[State], run: Run) -> int:
    """Which of the states the run belongs to."""
    return [state.code for state in found].index(_code(run))


def _code(run: Run) -> str:
    """The state of the code that a run belongs to."""
    return run["id"] if run["dirty"] or not run["commit"] else run["commit"]


def _state(pairs: Sequence[tuple[Run, Row]]) -> State:
    """One state, of the rows that its runs have measured."""
    runs, rows = zip(*pairs, strict=True)
    last = runs[-1]

    first, third = (statistics.median(r.quartiles[i] for r in rows) for i in (0, 1))
    value = statistics.median(row.value for row in rows)
    row = dataclasses.replace(rows[-1], value=value, quartiles=(first, third))
    return State(
        code=_code(last),
        commit=last["commit"],
        dirty=last["dirty"],
        committed=last["committed"] or runs[0]["date"],
        date=last["date"],
        runs=len(runs),
        row=row,
    )


def _margin(row: Row, before: Sequence[Row], usual: float) -> float:
    """How far from the usual value a row may lie by chance."""

    def spread(row: Row) -> float:
        return PER_IQR * (row.quartiles[1] - row.quartiles[0])

    own = OF_MEDIAN * spread(row) / math.sqrt(row.repeats)
    if len(before) < ENOUGH:
        return FEW_FACTOR * math.hypot(statistics.median(map(spread, before)), own)
    values = [other.value for other in before]
    from_usual = statistics.median(abs(value - usual) for value in values)
    neighbours = statistics.median(abs(b - a) for a, b in itertools.pairwise(values))
    scatter = PER_MAD * min(from_usual, neighbours / math.sqrt(2))
    return FACTOR * math.hypot(scatter, own)
