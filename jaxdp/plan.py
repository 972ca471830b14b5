"""Where every chunk lives while a schedule runs, found before anything is traced.

A value is an array of rows: the input, or what one move made. A move is one `ppermute`,
of one bundle of a round. Rounds that repeat (the same pairs, operation and kind of
chunk: a device's own, a partial sum, a complete one) become one loop, whose moves make
one value of all trips; a body may be several rounds, as many as `LONGEST_BODY`.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np

from jaxdp.schedule import (
    Bundle,
    Pairs,
    Placement,
    Schedule,
    bundles,
    local_row,
    local_rows,
)

LONGEST_BODY = 8  # rounds


class Kind(NamedTuple):
    """What the rounds of a loop have in common, move by move.

    Attributes:
        pairs: As in `jaxdp.schedule.Transfer`.
        op: As there.
        sends: What travels, as in `jaxdp.schedule.Bundle`.
        rows: How many chunks each pair moves.
    """

    pairs: Pairs
    op: str
    sends: str
    rows: int

    @property
    def complete(self) -> bool:
        """Whether complete chunks travel."""
        return self.sends == "complete"


@dataclasses.dataclass(frozen=True)
class Read:
    """What devices read: `[trips, devices, rows]` of values and rows in them.

    A row of -1 is read by nobody.
    """

    value: np.ndarray
    row: np.ndarray

    @classmethod
    def nothing(cls, trips: int, devices: int, rows: int) -> "Read":
        """To be filled."""
        shape = trips, devices, rows
        return cls(np.full(shape, -1), np.full(shape, -1))


@dataclasses.dataclass(frozen=True)
class Move:
    """One `ppermute` per trip.

    Attributes:
        kind: Of all its trips.
        value: Number of the value it makes, `[trips * kind.rows, length]`.
        sent: What sources send.
        own: What targets add to it; None if it replaces.
    """

    kind: Kind
    value: int
    sent: Read
    own: Read | None


class Loop(NamedTuple):
    """Rounds that run `trips` times, one after the other; of one trip, one round."""

    trips: int
    rounds: tuple[tuple[Move, ...], ...]

    @property
    def moves(self) -> list[Move]:
        """Of all rounds, in order."""
        return list(itertools.chain(*self.rounds))


class Plan(NamedTuple):
    """A schedule as loops, and what is read at the end."""

    loops: tuple[Loop, ...]
    output: Read

    def reads_after(self, number: int) -> list[Read]:
        """All reads after loop `number`."""
        later = self.loops[number + 1 :]
        moves = [move for loop in later for move in loop.moves]
        reads = [read for move in moves for read in (move.sent, move.own)]
        return [read for read in (*reads, self.output) if read is not None]


@functools.lru_cache(maxsize=64)
def planned(schedule: Schedule, widens: bool, rolled: bool) -> Plan:
    """Plans a verified schedule.

    Args:
        schedule: The schedule.
        widens: Whether sums are wider than what is summed.
        rolled: Whether rounds that repeat become loops.
    """
    rounds = [_round(each, widens) for each in bundles(schedule)]
    located = _Locations(schedule)
    loops, start = [], 0
    while start < len(rounds):
        body, trips = _loop(rounds, start) if rolled else (1, 1)
        end = start + body * trips
        loops.append(located.loop(rounds[start:end], body, trips))
        start = end
    return Plan(tuple(loops), located.output(schedule.ends))


class _Round(NamedTuple):
    """The moves of one round: their kinds, and chunks `[pairs, rows]` of each."""

    kinds: tuple[Kind, ...]
    chunks: tuple[np.ndarray, ...]


def _round(bundles_: tuple[Bundle, ...], widens: bool) -> _Round:
    """The moves of a round: where sums are no wider, contributions are like them."""
    kinds = tuple(
        Kind(
            bundle.pairs,
            bundle.op,
            "partial" if bundle.kind == "own" and not widens else bundle.kind,
            len(bundle.transfers),
        )
        for bundle in bundles_
    )
    chunks = [np.array([t.chunks for t in bundle.transfers]).T for bundle in bundles_]
    return _Round(kinds, tuple(chunks))


def _loop(rounds: list[_Round], start: int) -> tuple[int, int]:
    """The loop that begins here and spares most rounds: length of its body, trips."""
    best = 1, 1
    for body in range(1, LONGEST_BODY + 1):
        end = start + body
        while end < len(rounds) and rounds[end].kinds == rounds[end - body].kinds:
            end += 1
        trips = (end - start) // body
        if (trips - 1) * body > (best[1] - 1) * best[0]:
            best = body, trips
    return best


class _Locations:
    """In which row of which value every device holds every chunk."""

    def __init__(self, schedule: Schedule):
        self.devices = schedule.devices
        self.value = np.zeros((schedule.devices, schedule.chunks), int)
        rows = [local_row(schedule.starts, c) for c in range(schedule.chunks)]
        self.row = np.tile(rows, (schedule.devices, 1))
        self.values = 1  # so many there are

    def loop(self, rounds: list[_Round], body: int, trips: int) -> Loop:
        """Runs the rounds of a loop; of one alone, if it has one trip."""
        moves = [[self._move(k, trips) for k in r.kinds] for r in rounds[:body]]
        for index, round_ in enumerate(rounds):
            trip, place = divmod(index, body)
            self._advance(trip, moves[place], round_.chunks)
        return Loop(trips, tuple(map(tuple, moves)))

    def output(self, ends: Placement) -> Read:
        """Reads the chunks of `ends` where they must end."""
        read = Read.nothing(1, self.devices, local_rows(ends))
        for chunk, holders in enumerate(ends):
            devices, row = list(holders), local_row(ends, chunk)
            read.value[0, devices, row] = self.value[devices, chunk]
            read.row[0, devices, row] = self.row[devices, chunk]
        return read

    def _move(self, kind: Kind, trips: int) -> Move:
        """A move that has made no trip yet."""
        own = None
        if kind.op == "add":
            own = Read.nothing(trips, self.devices, kind.rows)
        self.values += 1
        sent = Read.nothing(trips, self.devices, kind.rows)
        return Move(kind, self.values - 1, sent, own)

    def _advance(self, trip: int, moves: list[Move], chunks) -> None:
        """Runs one round: everything is sent before anything is applied."""
        arriving = []
        for move, moved in zip(moves, chunks, strict=True):
            sources = np.array(move.kind.pairs)[:, :1]
            # A source's chunks in the order in which it holds them: fewer slices.
            held = self.row[sources, moved], self.value[sources, moved]
            moved = np.take_along_axis(moved, np.lexsort(held), axis=1)
            self._fill(move.sent, trip, sources, moved)
            arriving.append(moved)
        for move, moved in zip(moves, arriving, strict=True):
            targets, rows = np.array(move.kind.pairs)[:, 1:], move.kind.rows
            if move.own is not None:
                self._fill(move.own, trip, targets, moved)
            self.value[targets, moved] = move.value
            self.row[targets, moved] = trip * rows + np.arange(rows)

    def _fill(self, read: Read, trip: int, devices, chunks) -> None:
        """Notes that each of `devices`, `[pairs, 1]`, reads its chunks."""
        read.value[trip, devices[:, 0]] = self.value[devices, chunks]
        read.row[trip, devices[:, 0]] = self.row[devices, chunks]
