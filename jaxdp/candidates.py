"""The algorithms that a collective can go by, priced on some hardware."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from jaxdp import algorithms
from jaxdp.cost import cost, native_s, time_s
from jaxdp.schedule import Schedule
from jaxdp.targets.hardware import Hardware
from jaxdp.targets.kinds import HOST

TOLERANCE = 0.05  # of the quickest time
AT_ONCE = 1.3  # CPU devices that two cores serve, as far as copies go
HIERARCHICAL = "hierarchical"
NATIVE = {  # collectives of XLA, in its words
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "collective-broadcast",
}


@dataclass(frozen=True)
class Candidates:
    """The algorithms of a collective on so many devices.

    Attributes:
        collective: A key of `jaxdp.algorithms.SCHEDULES`.
        devices: N.
        hardware: What runs them.
        itemsize: Bytes of an element.
        partial_itemsize: Of a partial sum, where that is another number.
    """

    collective: str
    devices: int
    hardware: Hardware
    itemsize: int = 4
    partial_itemsize: int | None = None

    def names(self) -> list[str]:
        """Names, the standard one first."""
        found = [*algorithms.SCHEDULES[self.collective]]
        inside = self.hardware.devices_per_host
        full = 1 < inside < self.devices and self.devices % inside == 0
        if self.collective == "all_reduce" and full:
            found.append(HIERARCHICAL)
        return found

    def schedule(self, name: str) -> Schedule:
        """The schedule of one of them."""
        sizes = None
        if name == HIERARCHICAL:
            inside = self.hardware.devices_per_host
            sizes = self.devices // inside, inside
        return algorithms.build(self.collective, name, self.devices, sizes=sizes)

    def sent_bytes(self, name: str, size_bytes: int) -> list[int]:
        """What each device sends of a buffer."""
        schedule = self.schedule(name)
        length = -(-self._elements(size_bytes) // schedule.chunks)
        widths = self.itemsize, self.partial_itemsize
        return [length * size for size in _sent_by_one(schedule, *widths)]

    def seconds(self, name: str, size_bytes: int) -> float:
        """What one of them takes.

        CPU devices of one process share its memory and cores, which serve `AT_ONCE` of
        them: there the bytes of all devices count, unless one has most of them.
        """
        schedule, elements = self.schedule(name), self._elements(size_bytes)
        widths = self.itemsize, self.hardware, self.partial_itemsize
        apart_s = time_s(schedule, elements, *widths)
        if self.hardware != HOST:
            return apart_s
        copied_bytes = sum(self.sent_bytes(name, size_bytes)) / AT_ONCE
        copied_s = copied_bytes / HOST.link.bytes_per_s
        return max(apart_s, time_s(schedule, 0, 1, HOST) + copied_s)

    def native_s(self, size_bytes: int) -> float | None:
        """What XLA's own takes; None where it has none, or there is no model of it."""
        if self.collective not in NATIVE or self.hardware == HOST:
            return None
        given = self._elements(size_bytes)
        if self.collective == "all_gather":  # each device gives its shard
            given = -(-given // self.devices)
        kind = NATIVE[self.collective]
        return native_s(kind, given, self.itemsize, self.devices, self.hardware)

    def ordered(self, seconds: Mapping[str, float]) -> list[str]:
        """Names, the one to choose first, the others by time.

        Args:
            seconds: What each takes, in the order of `names`.
        """

        def place(name: str) -> tuple[float, int]:
            rounded = float(f"{seconds[name]:.9g}")  # sums differ in their last bits
            return rounded, len(self.schedule(name).rounds)

        names = sorted(seconds, key=place)  # equals stay in order
        standard = next(iter(seconds))
        allowed = 1 + TOLERANCE if self.devices > 2 else 1
        if seconds[standard] <= allowed * seconds[names[0]]:
            names.remove(standard)
            names.insert(0, standard)
        return names

    def _elements(self, size_bytes: int) -> int:
        return -(-size_bytes // self.itemsize)


@functools.lru_cache(maxsize=1024)
def _sent_by_one(
    schedule: Schedule, itemsize: int, partial_itemsize: int | None
) -> tuple[int, ...]:
    """What devices send if every chunk is one element: to count is slow."""
    return cost(schedule, schedule.chunks, itemsize, partial_itemsize).sent_bytes
