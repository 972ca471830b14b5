"""Which algorithm is quickest for so many bytes, on so many devices of some hardware.

Every algorithm of `jaxdp.algorithms.SCHEDULES`, and the hierarchical one if hosts are
equally full, is priced by the alpha-beta model (`jaxdp.cost.time_s`). Messages so small
that latency is what costs go in few rounds, large ones in chunks.

A ring needs links between neighbours only, its rounds are all alike, and it works on
every number of devices. The model is not exact, and alpha nowhere published: so the
standard algorithm of a collective, the ring, is chosen wherever it takes at most
`TOLERANCE` longer than the quickest. Two devices are neighbours whatever they do: there
the quickest is chosen. Among equals the fewest rounds win.

`N` is the number of devices, `K` the bytes of the buffer.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxdp import algorithms
from jaxdp.cost import cost, native_s, time_s
from jaxdp.schedule import Schedule
from jaxdp.targets.hardware import Hardware
from jaxdp.targets.hardware import hardware as described
from jaxdp.targets.kinds import HOST, hardware_here

TOLERANCE = 0.05  # of the quickest time
NATIVE = {  # collectives of XLA, in its words
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "collective-broadcast",
}
PRECISION = 0.01  # of the sizes of crossovers


class Candidate(NamedTuple):
    """One algorithm, priced.

    Attributes:
        algorithm: Its name.
        rounds: How many follow each other.
        sent_bytes: By the device that sends most.
        seconds: Predicted.
    """

    algorithm: str
    rounds: int
    sent_bytes: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what it was chosen from; prints as a table.

    Attributes:
        collective: Such as "all_reduce".
        size_bytes: K.
        devices: N.
        hardware: What was priced.
        candidates: The chosen one, then the others, quickest first.
        native_s: Predicted for XLA's own collective, which is not chosen from; None
            where it has none, or on CPU devices, for which there is no model of it.
    """

    collective: str
    size_bytes: int
    devices: int
    hardware: Hardware
    candidates: tuple[Candidate, ...] = field(repr=False)
    native_s: float | None = field(repr=False)

    @property
    def algorithm(self) -> str:
        """The name of what was chosen."""
        return self.candidates[0].algorithm

    @property
    def seconds(self) -> float:
        """What it takes, predicted."""
        return self.candidates[0].seconds

    @property
    def schedule(self) -> Schedule:
        """What was chosen, as every `algorithm=` takes it."""
        return _built(self.collective, self.algorithm, self.devices, self.hardware)

    def __str__(self) -> str:
        """The candidates, the chosen one first."""
        heads = "algorithm", "rounds", "busiest sends (bytes)", "predicted (us)"
        rows = [
            (c.algorithm, str(c.rounds), f"{c.sent_bytes:,}", f"{1e6 * c.seconds:,.1f}")
            for c in self.candidates
        ]
        if self.native_s is not None:
            rows.append(("native", "", "", f"{1e6 * self.native_s:,.1f}"))
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
            ).rstrip()
            for row in (heads, *rows)
        ]
        about = self.hardware
        first = (
            f"{self.collective} of {self.size_bytes:,} bytes on {self.devices} devices,"
            f" {about.name} ({about.link.name}): {self.algorithm}"
        )
        return "\n".join([first, *lines])


class Crossover(NamedTuple):
    """A size at which the choice changes.

    Attributes:
        size_bytes: From this size on, to 1 %.
        before: The algorithm that is chosen below.
        after: The algorithm that is chosen from there on.
    """

    size_bytes: int
    before: str
    after: str


def choose_algorithm(
    size_bytes: int,
    devices: int,
    hardware: Hardware | str | None = None,
    collective: str = "all_reduce",
    *,
    itemsize: int = 4,
    partial_itemsize: int | None = None,
) -> Choice:
    """Chooses the algorithm of a collective by its predicted time.

    Nothing is traced or run: the choice depends on these numbers alone.

    Args:
        size_bytes: K, of the whole buffer.
        devices: N >= 1, in hosts of `hardware.devices_per_host`.
        hardware: Or the name of a target, such as "h100"; None for the devices that
            are traced over, or else are here.
        collective: A key of `jaxdp.algorithms.SCHEDULES`.
        itemsize: Bytes of an element.
        partial_itemsize: Bytes an element of a partial sum takes, where that is another
            number; as for `jaxdp.cost.cost`.

    Raises:
        ValueError: A negative size, no devices, an unknown collective or target.

    Example:
        >>> choose_algorithm(1024, 8, "h100").algorithm
        'recursive_doubling'
    """
    machine = hardware_here() if hardware is None else described(hardware)
    _check(size_bytes, devices, collective, itemsize)
    return _choice(size_bytes, devices, machine, collective, itemsize, partial_itemsize)


def crossovers(
    devices: int,
    hardware: Hardware | str | None = None,
    collective: str = "all_reduce",
    *,
    least_bytes: int = 2**10,
    most_bytes: int = 2**30,
) -> tuple[Crossover, ...]:
    """The sizes at which another algorithm is chosen, of float32.

    Chunks are padded to whole elements, so that two algorithms of nearly the same time
    take turns within a few bytes: sizes are found to 1 %.

    Args:
        devices: N >= 1.
        hardware: As for `choose_algorithm`, like `collective`.
        collective: Which.
        least_bytes: The smallest size to look at, at least 1.
        most_bytes: The largest.

    Raises:
        ValueError: As `choose_algorithm`; or no sizes to look at.

    Example:
        >>> [found.before for found in crossovers(8, "h100")][:1]
        ['recursive_doubling']
    """
    machine = hardware_here() if hardware is None else described(hardware)
    _check(least_bytes, devices, collective, 4)
    if not 1 <= least_bytes <= most_bytes:
        raise ValueError(
            f"crossovers got least_bytes={least_bytes} and most_bytes={most_bytes}. "
            "It needs 1 <= least_bytes <= most_bytes. Use 2**10 and 2**30, for example."
        )

    sizes = [least_bytes]
    while sizes[-1] < most_bytes:  # half an octave apart
        sizes.append(min(math.ceil(sizes[-1] * math.sqrt(2)), most_bytes))
    chosen = functools.cache(
        lambda size_bytes: _ordered(_times(size_bytes, devices, machine, collective))[0]
    )
    found = []
    for low, high in itertools.pairwise(sizes):
        while chosen(low) != chosen(high):
            before, low = chosen(low), _boundary(chosen, low, high)
            found.append(Crossover(low, before, chosen(low)))
    return tuple(found)


def _boundary(chosen: Callable[[int], str], low: int, high: int) -> int:
    """From which size on, between two, another algorithm is chosen than at `low`."""
    before = chosen(low)
    while high - low > max(1, PRECISION * low):
        middle = (low + high) // 2
        low, high = (middle, high) if chosen(middle) == before else (low, middle)
    return high


@functools.lru_cache(maxsize=4096)
def _choice(
    size_bytes: int,
    devices: int,
    machine: Hardware,
    collective: str,
    itemsize: int,
    partial_itemsize: int | None,
) -> Choice:
    """Prices all candidates, and counts what they send."""
    widths = itemsize, partial_itemsize
    elements = -(-size_bytes // itemsize)
    times = _times(size_bytes, devices, machine, collective, *widths)
    candidates = []
    for name in _ordered(times):
        seconds, schedule = times[name]
        sent_bytes = max(_sent(schedule, elements, *widths))
        candidates.append(Candidate(name, len(schedule.rounds), sent_bytes, seconds))
    native = None
    if collective in NATIVE and machine != HOST:
        given = elements if collective != "all_gather" else -(-elements // devices)
        native = native_s(NATIVE[collective], given, itemsize, devices, machine)
    return Choice(collective, size_bytes, devices, machine, tuple(candidates), native)


def _seconds(
    schedule: Schedule,
    elements: int,
    itemsize: int,
    partial_itemsize: int | None,
    machine: Hardware,
) -> float:
    """What a schedule takes.

    CPU devices of one process share its memory and cores: there the bytes of all count,
    not those of the busiest.
    """
    if machine != HOST:
        return time_s(schedule, elements, itemsize, machine, partial_itemsize)
    sent_bytes = sum(_sent(schedule, elements, itemsize, partial_itemsize))
    return time_s(schedule, 0, 1, machine) + sent_bytes / machine.link.bytes_per_s


def _sent(
    schedule: Schedule, elements: int, itemsize: int, partial_itemsize: int | None
) -> list[int]:
    """Bytes that each device sends."""
    length = -(-elements // schedule.chunks)
    return [
        length * size for size in _sent_by_one(schedule, itemsize, partial_itemsize)
    ]


@functools.lru_cache(maxsize=1024)
def _sent_by_one(
    schedule: Schedule, itemsize: int, partial_itemsize: int | None
) -> tuple[int, ...]:
    """The same if every chunk is one element: to count takes longer than to multiply."""
    return cost(schedule, schedule.chunks, itemsize, partial_itemsize).sent_bytes


def _times(
    size_bytes: int,
    devices: int,
    machine: Hardware,
    collective: str,
    itemsize: int = 4,
    partial_itemsize: int | None = None,
) -> dict[str, tuple[float, Schedule]]:
    """What each candidate takes, in the order of `SCHEDULES`."""
    elements = -(-size_bytes // itemsize)
    found = {}
    for name in _names(collective, devices, machine):
        schedule = _built(collective, name, devices, machine)
        widths = itemsize, partial_itemsize
        found[name] = _seconds(schedule, elements, *widths, machine), schedule
    return found


def _names(collective: str, devices: int, machine: Hardware) -> list[str]:
    """The candidates, the standard one first."""
    inside = machine.devices_per_host
    hosts = collective == "all_reduce" and 1 < inside < devices and not devices % inside
    return [*algorithms.SCHEDULES[collective], *(["hierarchical"] if hosts else [])]


def _built(collective: str, name: str, devices: int, machine: Hardware) -> Schedule:
    """The schedule of a candidate."""
    inside = machine.devices_per_host
    sizes = (devices // inside, inside) if name == "hierarchical" else None
    return algorithms.build(collective, name, devices, sizes=sizes)


def _ordered(times: Mapping[str, tuple[float, Schedule]]) -> list[str]:
    """Names, the chosen one first, the others by time."""

    def place(name: str) -> tuple[float, int]:
        seconds, schedule = times[name]
        return float(f"{seconds:.9g}"), len(schedule.rounds)  # sums differ in rounding

    names = sorted(times, key=place)  # stable: the rest is by the order of `SCHEDULES`
    standard, (_, schedule) = next(iter(times.items()))
    allowed = 1 + TOLERANCE if schedule.devices > 2 else 1
    if times[standard][0] <= allowed * times[names[0]][0]:
        names.remove(standard)
        names.insert(0, standard)
    return names


def _check(size_bytes: int, devices: int, collective: str, itemsize: int) -> None:
    """Checks what a choice is asked for."""
    if collective not in algorithms.SCHEDULES:
        raise ValueError(
            f"choose_algorithm got collective={collective!r}. It must be one of "
            f"{', '.join(algorithms.SCHEDULES)}. Choose one of them."
        )
    if size_bytes < 0 or devices < 1 or itemsize < 1:
        raise ValueError(
            f"choose_algorithm got {size_bytes} bytes in elements of {itemsize} on "
            f"{devices} devices. It needs at least 0 bytes, in elements of at least 1, "
            "on at least 1 device. Give the size of the buffer and the number of "
            "devices on its mesh axis."
        )
