"""Replays a schedule on devices that have a compute and a communication stream each.

All devices issue the same items. A kernel runs on the compute stream, one after the
other. A pair of a permute starts when it is issued on both devices and both
communication streams are free; a group starts when that is so on all its devices, and
keeps them busy together. Others pass by. Copies between the memories of a TPU have an
engine of their own, and a kernel waits for one only where the schedule says.

Left out, so that real runs take longer: what a transfer or a copy takes from kernels
that run beside it, and the host's look at a condition.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxdp.program import transfers
from jaxdp.program.collective import CollectiveOp
from jaxdp.program.scheduled import Branches, Copy, Done, Item, Kernel, Loop, Start
from jaxdp.program.work import OTHER
from jaxdp.targets.hardware import Hardware

COMPUTE, COMMUNICATION = "compute", "communication"
_TURNS = 3  # of a loop: the first differs, two show whether it repeats
_COPIED_BARS = 20_000  # more are one bar a stream
_SAME = 1e-9  # relative: rounding of sums


@dataclasses.dataclass(eq=False)
class Record:
    """Something a stream of each device does: from when to when, [devices].

    `busy_s` is shorter than what is between where a record stands for many turns of a
    loop. A device that takes no part has NaN.
    """

    stream: str
    name: str
    kind: str
    start_s: np.ndarray
    end_s: np.ndarray
    busy_s: np.ndarray
    op: CollectiveOp | None = None

    def later(self, by_s: float) -> "Record":
        """The same some time later."""
        moved = {"start_s": self.start_s + by_s, "end_s": self.end_s + by_s}
        return dataclasses.replace(self, **moved)


class Streams:
    """Until when the streams of every device are taken, and what they did."""

    def __init__(self, devices: int, hardware: Hardware):
        self.hardware = hardware
        self.compute_s = np.zeros(devices)
        self.communication_s = np.zeros(devices)
        self.copies_s = 0.0
        self.ends: dict[str, np.ndarray] = {}  # of what was started, by device
        self.records: list[Record] = []
        self._known: dict[CollectiveOp, Callable[[np.ndarray], _Times]] = {}

    def run(self, items: Sequence[Item]) -> None:
        """All devices issue items."""
        for item in items:
            match item:
                case Kernel():
                    self._kernel(item)
                case Start():
                    self._start(item)
                case Copy():
                    self._copy(item)
                case Done():
                    self._wait(item.name, item.start)
                case Loop():
                    self._loop(item)
                case Branches():
                    self._branches(item)

    @property
    def end_s(self) -> float:
        """When the last stream of all is done."""
        return max(self.compute_s.max(), self.communication_s.max(), self.copies_s)

    def _kernel(self, kernel: Kernel) -> None:
        took = self.hardware.kernel_s(kernel.work.flops, kernel.work.bytes)
        start = self.compute_s
        self.compute_s = start + took
        self._record(COMPUTE, kernel.name, kernel.work.kind, start, self.compute_s)

    def _start(self, start: Start) -> None:
        op = start.op
        if op not in self._known:
            self._known[op] = _times(op, self.hardware)
        issued = np.maximum(self.compute_s, self.communication_s)
        begin, end = self._known[op](issued)
        taking_part = ~np.isnan(end)
        self.communication_s = np.where(taking_part, end, self.communication_s)
        self._record(COMMUNICATION, start.name, op.kind, begin, end, op)
        self.ends[start.name] = end
        if start.blocks:
            self._wait(start.name, start.name)

    def _copy(self, copy: Copy) -> None:
        """All devices copy alike, one after the other."""
        begin = max(self.copies_s, self.compute_s.max())
        self.copies_s = begin + copy.bytes / self.hardware.memory_bytes_per_s
        self.ends[copy.name] = np.full_like(self.compute_s, self.copies_s)

    def _wait(self, name: str, start: str) -> None:
        """Compute waits for what was started; for a copy, that is work of its own."""
        if start not in self.ends:  # kernels that were started are done, in order
            return
        before = self.compute_s
        self.compute_s = np.fmax(before, self.ends[start])
        if name != start and start in self._copies:
            self._record(COMPUTE, name, OTHER, before, self.compute_s)

    def _record(
        self,
        stream: str,
        name: str,
        kind: str,
        start_s: np.ndarray,
        end_s: np.ndarray,
        op: CollectiveOp | None = None,
    ) -> None:
        busy = end_s - start_s
        self.records.append(Record(stream, name, kind, start_s, end_s, busy, op))
