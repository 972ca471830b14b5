"""What a schedule looks like, as data: panels of cells and arrows, in lines.

A panel is one moment: what every device holds of every chunk, and what it sends next.
A line is one phase of the schedule, rounds that only add, only replace or do both, and
ends with the panel that the phase leads to.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from jaxdp.schedule import Holdings, Round, Schedule, Transfer, holdings

Op = Literal["add", "replace"]
PHASES = {
    "add": "Send and add",
    "replace": "Send and replace",
    "mixed": "Send, and add or replace",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one device holds of one chunk.

    Attributes:
        device: The device.
        chunk: The chunk.
        held: Devices whose contributions are summed in it.
        share: Part of all contributions: 0 holds nothing, 1 is complete.
    """

    device: int
    chunk: int
    held: frozenset[int]
    share: float


@dataclasses.dataclass(frozen=True)
class Arrow:
    """A chunk on its way.

    Attributes:
        source: Who sends it.
        target: Who adds it to its own ("add") or stores it ("replace").
        chunk: Which one.
        wraps: Whether the pair closes a ring.
        op: What the target does.
    """

    source: int
    target: int
    chunk: int
    wraps: bool = False
    op: Op = "add"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One moment: what is held, and what the next round sends."""

    title: str
    cells: tuple[Cell, ...]
    arrows: tuple[Arrow, ...] = ()


@dataclasses.dataclass(frozen=True)
class Line:
    """The panels of one phase."""

    title: str
    panels: tuple[Panel, ...]


def moments(schedule: Schedule) -> tuple[Panel, ...]:
    """The moments of a schedule: before every round, and after the last.

    Raises:
        ValueError: The schedule is malformed; see `jaxdp.schedule.holdings`.
    """
    held = [_cells(schedule, each) for each in holdings(schedule)]
    rounds = schedule.rounds
    before = (
        Panel(f"Round {index}", held[index], _arrows(round_, schedule.devices))
        for index, round_ in enumerate(rounds)
    )
    last = f"After round {len(rounds) - 1}" if rounds else "Start and end"
    return (*before, Panel(last, held[-1]))


def lines(schedule: Schedule) -> tuple[Line, ...]:
    """Lays a schedule out.

    Raises:
        ValueError: The schedule is malformed; see `jaxdp.schedule.holdings`.
    """
    panels = moments(schedule)
    if not schedule.rounds:
        return (Line("Nothing to send", panels),)
    result, done = [], 0
    for phase, rounds in itertools.groupby(schedule.rounds, _phase):
        start, done = done, done + len([*rounds])
        after = Panel(f"After round {done - 1}", panels[done].cells)
        title = f"{PHASES[phase]}, until {outcome(after.cells)}"
        result.append(Line(title, (*panels[start:done], after)))
    return tuple(result)


def broken(laid_out: tuple[Line, ...], columns: int) -> list[Line]:
    """Breaks lines that are too long for the page, into parts about as long."""
    result = []
    for line in laid_out:
        parts = math.ceil(len(line.panels) / max(columns, 1))
        width = math.ceil(len(line.panels) / parts)
        for start in range(0, len(line.panels), width):
            panels = line.panels[start : start + width]
            result.append(Line("" if start else line.title, panels))
    return result


def reach(arrow: Arrow) -> int:
    """How many devices further the chunk goes; 1 to a neighbour."""
    return 1 if arrow.wraps else abs(arrow.target - arrow.source)


def outcome(cells: Sequence[Cell]) -> str:
    """Who holds how many complete chunks."""
    complete = collections.Counter(cell.device for cell in cells if cell.share == 1)
    devices = {cell.device for cell in cells}
    chunks = len({cell.chunk for cell in cells})
    if not complete:
        return "no device holds a complete chunk"
    who = f"{those(complete)} hold{'s' if len(complete) == 1 else ''}"
    if set(complete) == devices:
        who = "every device holds"
    fewest, most = min(complete.values()), max(complete.values())
    many = {0: f"{most}", 1: f"{fewest} or {most}"}.get(
        most - fewest, f"{fewest} to {most}"
    )
    return f"{who} {many} of {chunks} chunks complete"


def those(numbers: Iterable[int], name: str = "device") -> str:
    """Devices or chunks in words: "devices 0, 2 and 3"."""
    names = [*map(str, sorted(numbers))]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    return f"{name}{'s' if names[1:] else ''} {listed}"


def _phase(round_: Round) -> str:
    """The one `op` of a round, or "mixed"."""
    ops = {transfer.op for transfer in round_.transfers}
    return ops.pop() if len(ops) == 1 else "mixed"


def _cells(schedule: Schedule, held: Holdings) -> tuple[Cell, ...]:
    return tuple(
        Cell(device, chunk, held[device][chunk], len(held[device][chunk]) / len(starts))
        for device in range(schedule.devices)
        for chunk, starts in enumerate(schedule.starts)
    )


def _arrows(round_: Round, devices: int) -> tuple[Arrow, ...]:
    return tuple(
        Arrow(
            *(source, target, chunk),
            _wraps(transfer, source, target, devices),
            transfer.op,
        )
        for transfer in round_.transfers
        for source, target, chunk in transfer
    )


def _wraps(transfer: Transfer, source: int, target: int, devices: int) -> bool:
    """Whether all devices send around the ring and this pair closes it."""
    everyone = len(transfer.pairs) == devices > 2
    return everyone and {source, target} == {0, devices - 1}
