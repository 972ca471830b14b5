"""What every algorithm sends and takes, by the cost of its schedule."""

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction

import jaxdp
from experiments.harness.result import Rows
from jaxdp import algorithms
from jaxdp.choice import crossovers
from jaxdp.cost import cost
from jaxdp.schedule import Schedule
from jaxdp.targets import Hardware

KIND = "all_reduce"
HOST = 8  # devices of one
LEAST, LARGEST = 2**10, 2**30  # bytes
NAMES = (*algorithms.SCHEDULES[KIND], "hierarchical")
SIZES = tuple(2**power for power in range(10, 31, 2))
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
EXACT = 720_720  # elements, a multiple of all numbers of chunks up to 16
LABEL = "predicted by the schedules, alpha and beta; nothing is timed"


def written(size_bytes: int) -> str:
    """A size in words: `1 KiB`."""
    for unit, size in UNITS.items():
        if size_bytes >= size:
            count = size_bytes / size
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    return f"{size_bytes} B"


def moved(counts: Sequence[int]) -> Rows:
    """Rounds, and what the busiest device and all together send of the K bytes."""
    rows = []
    for devices in counts:
        for name in NAMES:
            schedule = _schedule(name, devices)
            if schedule is None:
                continue
            elements = EXACT * schedule.chunks
            found = cost(schedule, elements, 1)
            rows.append(
                {
                    "N": devices,
                    "algorithm": name,
                    "rounds": found.rounds,
                    "chunks": schedule.chunks,
                    "busiest sends / K": max(found.sent_bytes) / elements,
                    "busiest receives / K": max(found.received_bytes) / elements,
                    "all send / K": float(Fraction(sum(found.sent_bytes), elements)),
                    "links used": len(found.link_bytes),
                }
            )
    return rows


def _schedule(name: str, devices: int) -> Schedule | None:
    """An algorithm's; None for the hierarchical one if hosts of 8 are not full."""
    if name != "hierarchical":
        return algorithms.build(KIND, name, devices)
    hosts, rest = divmod(devices, HOST)
    return None if rest or hosts < 2 else algorithms.hierarchical(devices, hosts)


def predicted(
    machines: Mapping[str, Hardware], counts: Sequence[int], sizes: Sequence[int]
) -> Rows:
    """Times of all algorithms, and of XLA's own: a row each, a column for each size."""
    rows = []
    for hardware, machine in machines.items():
        for devices in counts:
            times = [
                _times(jaxdp.choose_algorithm(size, devices, machine)) for size in sizes
            ]
            for name in [name for name in (*NAMES, "native") if name in times[0]]:
                seconds = [each[name] for each in times]
                columns = zip(sizes, seconds, strict=True)
                rows.append(
                    {"hardware": hardware, "N": devices, "algorithm": name}
                    | {f"{written(size)}_us": 1e6 * s for size, s in columns}
                    | {"label": LABEL}
                )
    return rows


def _times(choice: jaxdp.Choice) -> dict[str, float]:
    """What each candidate takes, and XLA's own all-reduce."""
    assert choice.native_s is not None  # there is none on CPUs alone
    times = {c.algorithm: c.seconds for c in choice.candidates}
    return times | {"native": choice.native_s}


def chosen(machines: Mapping[str, Hardware], counts: Sequence[int]) -> Rows:
    """What is chosen, by hardware and N, from the smallest size to the largest."""
    return [
        {
            "hardware": hardware,
            "N": devices,
            "chosen": "; ".join(
                name if size == LEAST else f"from {written(size)} {name}"
                for size, name in _starts(machine, devices)
            ),
        }
        for hardware, machine in machines.items()
        for devices in counts
    ]


def changes(machines: Mapping[str, Hardware], counts: Sequence[int]) -> Rows:
    """The sizes from which on each algorithm is chosen, from 1 KiB to 1 GiB."""
    return [
        {"hardware": hardware, "N": devices, "from_bytes": size, "chosen": name}
        for hardware, machine in machines.items()
        for devices in counts
        for size, name in _starts(machine, devices)
    ]


@functools.cache
def _starts(machine: Hardware, devices: int) -> list[tuple[int, str]]:
    """The sizes from which on an algorithm is chosen, and which one."""
    first = jaxdp.choose_algorithm(LEAST, devices, machine).algorithm
    found = crossovers(devices, machine, least_bytes=LEAST, most_bytes=LARGEST)
    return [(LEAST, first), *((each.size_bytes, each.after) for each in found)]
