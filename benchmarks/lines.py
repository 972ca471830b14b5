"""The line of a benchmark over commits: from values to places in a picture."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import wording
from benchmarks.changes import Change, State
from experiments.harness.wording import slug

WIDTH, HEIGHT = 360, 132
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 24  # room for labels
FAR = 2.0  # a limit so many times above all values is not drawn


class Point(NamedTuple):
    """One state: its place, what it says when pointed at, and what it is."""

    x: float
    y: float
    title: str
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Places in a picture of `WIDTH` by `HEIGHT`, y downwards.

    Attributes:
        points: One per state.
        line: Through their values, "x,y x,y" as SVG has it.
        band: Around their quartiles, a polygon likewise.
        limit: The height of the limit; None if there is none, or it is far above.
        usual: The height of what is usual; None for a new row.
        ticks: Heights and labels of the lowest and the highest quartile.
        ends: Labels of the first and the last state; the last is empty if it is alone.
        says: The same in words.
    """

    points: list[Point]
    line: str
    band: str
    limit: float | None
    usual: float | None
    ticks: list[tuple[float, str]]
    ends: tuple[str, str]
    says: str


def chart(states: Sequence[State], change: Change) -> Chart:
    """Places for at least one state, of which `change` judges one."""
    rows = [state.row for state in states]
    low = min(row.quartiles[0] for row in rows)
    high = max(row.quartiles[1] for row in rows)
    limit = change.row.limit
    if limit is not None and limit > FAR * high:
        limit = None
    height = _heights([low, high, limit, change.usual])
    xs = _across(len(states))
    points = [
        Point(x, height(state.row.value), _title(state), _kind(state, change))
        for x, state in zip(xs, states, strict=True)
    ]
    first, third = (
        [(x, height(row.quartiles[i])) for x, row in zip(xs, rows, strict=True)]
        for i in (0, 1)
    )
    ends = states[0].label, states[-1].label if len(states) > 1 else ""
    return Chart(
        points=points,
        line=_path([(point.x, point.y) for point in points]),
        band=_path(third + first[::-1]),
        limit=None if limit is None else height(limit),
        usual=None if change.usual is None else height(change.usual),
        ticks=[(height(v), wording.number(v)) for v in sorted({low, high})],
        ends=ends,
        says=f"{change.row.name}, {len(states)} states of the code; "
        f"the last: {_title(states[-1])}",
    )


def _heights(shown: Sequence[float | None]) -> Callable[[float], float]:
    """From values to heights, so that all that are shown have room."""
    values = [value for value in shown if value is not None]
    low, high = min(values), max(values)
    room = (high - low) or abs(high) or 1.0  # a single value lies at the bottom

    def height(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / room * (HEIGHT - TOP - BOTTOM)

    return height


def _across(count: int) -> list[float]:
    """From left to right; one alone is in the middle."""
    room = WIDTH - LEFT - RIGHT
    if count == 1:
        return [LEFT + room / 2]
    return [LEFT + room * index / (count - 1) for index in range(count)]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _title(state: State) -> str:
    """Commit, day, value and quartiles."""
    row = state.row
    return (
        f"{state.label}, {state.date[:10]}: {wording.value(row)} "
        f"({wording.quartiles(row)})"
    )


def _kind(state: State, change: Change) -> str:
    """A class for the style: the judged one, of changed files, or any."""
    if state.code == change.state.code:
        return f"judged {slug(change.verdict)}"
    return "changed" if state.dirty else "plain"
