"""Which algorithm is quickest for so many bytes, on so many devices of some hardware.

Every algorithm of `jaxdp.algorithms.SCHEDULES`, and the hierarchical one if hosts are
equally full, is priced by the alpha-beta model (`jaxdp.cost.time_s`). Messages so small
that latency is what costs go in few rounds, large ones in chunks.

A ring needs links between neighbours only, its rounds are all alike, and it works on
every number of devices. The model is not exact, and alpha nowhere published: so the
standard algorithm of a collective, the ring, is chosen wherever it takes at most
5 % longer than the quickest. Two devices are neighbours whatever they do: there
the quickest is chosen. Among equals the fewest rounds win.

`N` is the number of devices, `K` the bytes of the buffer.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxdp import algorithms
from jaxdp.candidates import Candidates
from jaxdp.schedule import Schedule
from jaxdp.targets.hardware import Hardware
from jaxdp.targets.hardware import hardware as described
from jaxdp.targets.kinds import hardware_here

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
        among = Candidates(self.collective, self.devices, self.hardware)
        return among.schedule(self.algorithm)

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

    Returns:
        The choice, with what every algorithm would cost. It prints as a table.

    Raises:
        ValueError: A negative size, no devices, an unknown collective or target.

    Example:
        >>> choose_algorithm(1024, 8, "h100").algorithm
        'recursive_doubling'
    """
    machine = hardware_here() if hardware is None else described(hardware)
    _check("choose_algorithm", size_bytes, devices, collective, itemsize)
    widths = itemsize, partial_itemsize
    return _choice(size_bytes, Candidates(collective, devices, machine, *widths))


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

    Returns:
        One for every change of the choice, by size.

    Raises:
        ValueError: As `choose_algorithm`; or no sizes to look at.

    Example:
        >>> [found.before for found in crossovers(8, "h100")][:1]
        ['recursive_doubling']
    """
    machine = hardware_here() if hardware is None else described(hardware)
    _check("crossovers", least_bytes, devices, collective, 4)
    if not 1 <= least_bytes <= most_bytes:
        raise ValueError(
            f"crossovers got least_bytes={least_bytes} and most_bytes={most_bytes}. "
            "It needs 1 <= least_bytes <= most_bytes. Use 2**10 and 2**30, for example."
        )
    among = Candidates(collective, devices, machine)

    @functools.cache
    def chosen(size_bytes: int) -> str:
        times = {name: among.seconds(name, size_bytes) for name in among.names()}
        return among.ordered(times)[0]

    sizes = [least_bytes]
    while sizes[-1] < most_bytes:  # half an octave apart
        sizes.append(min(math.ceil(sizes[-1] * math.sqrt(2)), most_bytes))
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
def _choice(size_bytes: int, among: Candidates) -> Choice:
    """Prices all candidates, and counts what they send."""
    times = {name: among.seconds(name, size_bytes) for name in among.names()}
    priced = tuple(
        Candidate(
            name,
            len(among.schedule(name).rounds),
            max(among.sent_bytes(name, size_bytes)),
            times[name],
        )
        for name in among.ordered(times)
    )
    about = among.collective, size_bytes, among.devices, among.hardware
    return Choice(*about, priced, among.native_s(size_bytes))


def _check(
    caller: str, size_bytes: int, devices: int, collective: str, itemsize: int
) -> None:
    """Checks what a choice is asked for."""
    if collective not in algorithms.SCHEDULES:
        raise ValueError(
            f"{caller} got collective={collective!r}. It must be one of "
            f"{', '.join(algorithms.SCHEDULES)}. Choose one of them."
        )
    if size_bytes < 0 or devices < 1 or itemsize < 1:
        raise ValueError(
            f"{caller} got {size_bytes} bytes in elements of {itemsize} on "
            f"{devices} devices. It needs at least 0 bytes, in elements of at least 1, "
            "on at least 1 device. Give the size of the buffer and the number of "
            "devices on its mesh axis."
        )
