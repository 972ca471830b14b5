"""Replays a schedule on devices that have a compute and a communication stream each.

All devices issue the same items. A kernel runs on the compute stream, one after the
other. A pair of a permute starts when it is issued on both devices and both
communication streams are free; a group starts when that is so on all its devices, and
keeps them busy together. Others pass by. Copies between the memories of a TPU have an
engine of their own, and compute waits for one where the schedule says.

Left out, so that real runs take longer: what a transfer or a copy takes from kernels
that run beside it, and the host's look at a condition.
"""

import copy
from collections.abc import Sequence

import numpy as np

from jaxdp.program.collective import CollectiveOp
from jaxdp.program.timeline import transfers
from jaxdp.program.timeline.records import COMMUNICATION, COMPUTE, Record, merged
from jaxdp.program.timeline.scheduled import (
    Branches,
    Copy,
    Done,
    Item,
    Kernel,
    Loop,
    Start,
)
from jaxdp.program.timeline.work import OTHER
from jaxdp.targets.hardware import Hardware

_SHOWN_RECORDS = 20_000  # of the trips of one loop; more are one record a stream
_ROUNDING = 1e-9  # relative; of sums that would be equal


class Streams:
    """Until when the streams of every device are taken, and what they did."""

    def __init__(self, devices: int, hardware: Hardware):
        """All idle, at time 0."""
        self.hardware = hardware
        # [3, devices]: compute, communication, copies
        self.free_s = np.zeros((3, devices))
        self.ends: dict[str, np.ndarray] = {}  # of transfers, by device
        self.copied: dict[str, np.ndarray] = {}
        self.records: list[Record] = []
        self._placings: dict[tuple, transfers.Placing] = {}

    @property
    def end_s(self) -> float:
        """When the last stream of all is done."""
        return float(self.free_s.max())

    def run(self, items: Sequence[Item]) -> None:
        """All devices issue items."""
        issue = {
            Kernel: self._kernel,
            Start: self._start,
            Copy: self._copy,
            Done: self._done,
            Loop: self._loop,
            Branches: self._branches,
        }
        for item in items:
            issue[type(item)](item)

    def _kernel(self, kernel: Kernel) -> None:
        took = self.hardware.kernel_s(kernel.work.flops, kernel.work.bytes)
        start = self.free_s[0].copy()
        self.free_s[0] += took
        end = self.free_s[0].copy()
        self._record(COMPUTE, kernel.name, kernel.work.kind, start, end)

    def _start(self, start: Start) -> None:
        op = start.op
        key = op.kind, op.arrays, op.groups, op.pairs
        if key not in self._placings:
            self._placings[key] = transfers.placing(op, self.hardware)
        begin, end = self._placings[key](self.free_s[:2].max(axis=0))
        self.free_s[1] = np.fmax(self.free_s[1], end)
        self._record(COMMUNICATION, start.name, op.kind, begin, end, op)
        self.ends[start.name] = end
        if start.blocks:
            self.free_s[0] = np.fmax(self.free_s[0], end)

    def _copy(self, copied: Copy) -> None:
        begin = self.free_s[[0, 2]].max(axis=0)
        self.free_s[2] = begin + copied.bytes / self.hardware.memory_bytes_per_s
        self.copied[copied.name] = self.free_s[2].copy()

    def _done(self, done: Done) -> None:
        """Compute waits for a transfer; or for a copy, which is work of its own.

        Kernels that were started are done: they run in order.
        """
        start = self.free_s[0].copy()
        if done.start in self.ends:
            self.free_s[0] = np.fmax(start, self.ends[done.start])
        elif done.start in self.copied:
            self.free_s[0] = np.fmax(start, self.copied[done.start])
            end = self.free_s[0].copy()
            self._record(COMPUTE, done.name, OTHER, start, end)

    def _branches(self, item: Branches) -> None:
        """The branch that takes longest, whichever would run."""
        tried = []
        for branch in item.branches:
            fork = copy.copy(self)
            fork.free_s, fork.records = self.free_s.copy(), []
            fork.run(branch)
            tried.append(fork)
        longest = max(tried, key=lambda fork: (fork.end_s, fork.free_s[0].max()))
        self.free_s = longest.free_s
        self.records += longest.records

    def _loop(self, loop: Loop) -> None:
        """Trip after trip, until a trip takes as long as the one before."""
        self.run(loop.condition)
        moved = np.full_like(self.free_s, np.nan)
        for trip in range(loop.trips):
            before, first = self.free_s.copy(), len(self.records)
            self.run(loop.body + loop.condition)
            last_moved, moved = moved, self.free_s - before
            if self._repeats(moved, last_moved):
                self._repeat(loop, first, moved, loop.trips - trip - 1)
                return

    def _repeats(self, moved: np.ndarray, last_moved: np.ndarray) -> bool:
        """Whether all later trips are this one, some time later.

        On each device, all streams that are in use have moved by the same time, twice,
        and no other reached into the trip. Then devices that wait for each other
        move alike: whoever is earlier waits in every trip.
        """
        used = moved > 0
        by = moved.max(axis=0)  # [devices]
        latest = np.where(used, -np.inf, self.free_s).max(axis=0)
        earliest = np.where(used, self.free_s - moved, np.inf).min(axis=0)
        return bool(
            np.allclose(moved, last_moved, rtol=_ROUNDING, atol=0)
            and np.allclose(moved, np.where(used, by, 0.0), rtol=_ROUNDING, atol=0)
            and (latest <= earliest).all()
        )

    def _repeat(self, loop: Loop, first: int, moved: np.ndarray, times: int) -> None:
        by = moved.max(axis=0)  # [devices]
        trip = self.records[first:]
        if len(trip) * times <= _SHOWN_RECORDS:
            for number in range(1, times + 1):
                self.records += [record.later(number * by) for record in trip]
        else:
            self.records += merged(loop.name, trip, by, times)
        self.free_s += times * moved

    def _record(
        self,
        stream: str,
        name: str,
        kind: str,
        start_s: np.ndarray,
        end_s: np.ndarray,
        op: CollectiveOp | None = None,
    ) -> None:
        took = end_s - start_s
        self.records.append(Record(stream, name, kind, start_s, end_s, took, op))
