"""Rounds that repeat, as one `lax.scan`: a program whose size does not grow with N.

`jaxdp.sites` says what is carried from trip to trip. What came in all trips is kept if
a trip reads further back than the one before, or if something after the loop reads it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.plan import Loop, Move, Read
from jaxdp.rows import Source, picked
from jaxdp.sites import BEFORE, CARRIED, EARLIER, NOW, OUTSIDE, Key, Site, found_in

if TYPE_CHECKING:
    from jaxdp.executor import Execution


def run_loop(execution: "Execution", loop: Loop, later: list[Read]) -> None:
    """Runs a loop and registers those of its values that are read after it.

    Args:
        execution: The values so far.
        loop: The rounds.
        later: All reads after the loop.
    """
    _Run(execution, loop, later).run()


class _Run:
    """One run of a loop.

    Attributes:
        moves: By number of the value that they make.
        sent: What each sends.
        own: What each adds to what arrives.
        last: Values of which the last trip's rows alone are read later.
        stacked: Values of which more is.
    """

    def __init__(self, execution: "Execution", loop: Loop, later: list[Read]):
        self.execution, self.loop = execution, loop
        self.moves = {move.value: move for move in loop.moves}
        self.sent = {
            n: found_in(loop, move.sent, 2 * n, move.kind.complete)
            for n, move in self.moves.items()
        }
        self.own = {
            n: found_in(loop, move.own, 2 * n + 1)
            for n, move in self.moves.items()
            if move.own is not None
        }
        rows = {n: [r.row[r.value == n] for r in later] for n in self.moves}
        read = {n: np.concatenate(found) for n, found in rows.items()}
        first = {n: self._first_of_last(move) for n, move in self.moves.items()}
        after = [n for n, found in read.items() if found.size]
        self.last = [n for n in after if read[n].min() >= first[n]]
        self.stacked = [n for n in after if n not in self.last]

    def run(self) -> None:
        """Runs them, and registers what is read later."""
        self.outside = dict(self._outside())  # finished here, once, not in each trip
        start = self._start()
        stacked = [n for n in self.stacked if (EARLIER, n, 0) not in start]

        def trip(carry, index):
            now = self._trip(carry, index)
            new = {key: self._carried(key, carry, now, index) for key in carry}
            return new, {n: now[n] for n in stacked}

        trips = jnp.arange(self.loop.trips, dtype=jnp.int32)
        carry, made = lax.scan(trip, start, trips)
        for n in self.stacked:
            array = made[n] if n in made else carry[EARLIER, n, 0]
            self._register(n, Source(array.reshape(-1, array.shape[-1])))
        for n in self.last:
            array = next(carry[k] for k in carry if k[1] == n and k[0] != EARLIER)
            self._register(n, Source(array, self._first_of_last(self.moves[n])))

    def _trip(self, carry: dict, index: jax.Array) -> dict[int, jax.Array]:
        """What arrives in one trip, by value."""
        now: dict[int, jax.Array] = {}
        for round_ in self.loop.rounds:
            sent = [
                self.execution.sent(
                    move.kind,
                    self._read(self.sent[move.value], move, carry, now, index),
                )
                for move in round_
            ]
            for move, arrived in zip(round_, sent, strict=True):
                if move.own is not None:
                    own = self._read(self.own[move.value], None, carry, now, index)
                    arrived = self.execution.added(arrived, own)
                now[move.value] = arrived
        return now

    def _read(self, site: Site, sends: Move | None, carry, now, index) -> jax.Array:
        """What a site reads in one trip."""
        complete = sends is not None and sends.kind.complete
        sources = {}
        for number, (place, n, handed) in enumerate(site.keys):
            if place == OUTSIDE:
                sources[number] = self.outside[n, complete]
                continue
            array = now[n] if place == NOW else carry[place, n, handed]
            sources[number] = Source(array)
            if complete and not self.moves[n].kind.complete:
                sources[number] = Source(array, 0, self.execution.finish)
        return picked(sources, site.read, self.execution.rank, index)

    def _outside(self) -> Iterator[tuple[tuple[int, bool], Source]]:
        """What there is before the loop, by value and whether it is read complete."""
        for site, sends in self._sites():
            complete = sends is not None and sends.kind.complete
            for place, n, _ in site.keys:
                if place == OUTSIDE:
                    yield (n, complete), self.execution.source(n, complete)

    def _start(self) -> dict[Key, jax.Array]:
        """What is carried into the first trip."""
        start = {}
        for site, sends in self._sites():
            for key in site.keys:
                if key[0] not in CARRIED or key in start:
                    continue
                move = self.moves[key[1]]
                trips = self.loop.trips if key[0] == EARLIER else 1
                rows, dtype = trips * move.kind.rows, self.execution.made(move.kind)
                if site.start is None:
                    start[key] = self.execution.zeros(rows, dtype)
                else:
                    complete = sends is not None and sends.kind.complete
                    array = self.execution.read(site.start, complete)
                    start[key] = array.astype(dtype)
        for n in self.last:
            if not any(key[1] == n and key[0] != EARLIER for key in start):
                kind = self.moves[n].kind
                zeros = self.execution.zeros(kind.rows, self.execution.made(kind))
                start[BEFORE, n, 0] = zeros
        return start

    def _carried(self, key: Key, carry: dict, now: dict, index: jax.Array) -> jax.Array:
        """What is carried into the next trip."""
        place, n, _ = key
        if place != EARLIER:
            return now[n]
        row = index * self.moves[n].kind.rows
        return lax.dynamic_update_slice_in_dim(
            carry[key], now[n], row, 0, allow_negative_indices=False
        )

    def _sites(self) -> Iterator[tuple[Site, Move | None]]:
        """All reads, and the move that sends what is read, if one does."""
        for n, site in self.sent.items():
            yield site, self.moves[n]
        for site in self.own.values():
            yield site, None

    def _register(self, n: int, source: Source) -> None:
        """Makes a value known to what follows."""
        self.execution.register(n, source, self.moves[n].kind.complete)

    def _first_of_last(self, move: Move) -> int:
        """The first row that the last trip makes."""
        return (self.loop.trips - 1) * move.kind.rows
