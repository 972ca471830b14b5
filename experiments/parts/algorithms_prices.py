"""What every algorithm sends and takes, by the cost of its schedule."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import jaxdp
from experiments.harness.result import Rows
from jaxdp import algorithms
from jaxdp.choice import crossovers
from jaxdp.cost import cost
from jaxdp.targets import Hardware

KIND = "all_reduce"
LEAST, LARGEST = 2**10, 2**30  # bytes
SIZES = tuple(2**power for power in range(10, 31, 2))
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
EXACT = 720_720  # elements, a multiple of all numbers of chunks up to 16
LABEL = "predicted by the schedules, alpha and beta; nothing is timed"


def written(size_bytes: int) -> str:
    """A size in words: `1 KiB`."""
    for unit, size in UNITS.items():
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"


def moved(counts: Sequence[int]) -> Rows:
    """Rounds, and what the busiest device and all together send of the K bytes."""
    rows = []
    for name in algorithms.SCHEDULES[KIND]:
        for devices in counts:
            schedule = algorithms.build(KIND, name, devices)
            elements = EXACT * schedule.chunks
            found = cost(schedule, elements, 1)
            rows.append(
                {
                    "algorithm": name,
                    "N": devices,
                    "rounds": found.rounds,
                    "chunks": schedule.chunks,
                    "busiest sends / K": max(found.sent_bytes) / elements,
                    "busiest receives / K": max(found.received_bytes) / elements,
                    "all send / K": float(Fraction(sum(found.sent_bytes), elements)),
                    "links used": len(found.link_bytes),
                }
            )
    return rows


def predicted(
    machines: Mapping[str, Hardware], counts: Sequence[int], sizes: Sequence[int]
) -> Rows:
    """Times of all algorithms, and of XLA's own: a row each, a column for each size."""
    rows = []
    for hardware, machine in machines.items():
        for devices in counts:
            chosen = [jaxdp.choose_algorithm(size, devices, machine) for size in sizes]
            times: dict[str, list[float]] = {"native": []}
            times = {name: [] for name in algorithms.SCHEDULES[KIND]} | times
            for choice in chosen:
                for candidate in choice.candidates:
                    times[candidate.algorithm].append(candidate.seconds)
                assert choice.native_s is not None
                times["native"].append(choice.native_s)
            for name, seconds in times.items():
                columns = zip(sizes, seconds, strict=True)
                rows.append(
                    {"hardware": hardware, "N": devices, "algorithm": name}
                    | {f"{written(size)}_us": 1e6 * s for size, s in columns}
                    | {"label": LABEL}
                )
    return rows


def quickest(
    machines: Mapping[str, Hardware], counts: Sequence[int], sizes: Sequence[int]
) -> Rows:
    """What is chosen, by hardware and N: a column for each size."""
    return [
        {"hardware": hardware, "N": devices}
        | {
            written(size): jaxdp.choose_algorithm(size, devices, machine).algorithm
            for size in sizes
        }
        for hardware, machine in machines.items()
        for devices in counts
    ]


def changes(machines: Mapping[str, Hardware], counts: Sequence[int]) -> Rows:
    """Where the choice changes, from 1 KiB to 1 GiB."""
    rows = []
    for hardware, machine in machines.items():
        for devices in counts:
            found = crossovers(devices, machine, most_bytes=LARGEST)
            first = jaxdp.choose_algorithm(LEAST, devices, machine).algorithm
            starts = [(LEAST, first), *((c.size_bytes, c.after) for c in found)]
            rows += [
                {
                    "hardware": hardware,
                    "N": devices,
                    "from_bytes": size_bytes,
                    "from": written(size_bytes),
                    "chosen": name,
                }
                for size_bytes, name in starts
            ]
    return rows
