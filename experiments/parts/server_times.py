"""How long servers and a ring take on links of limited bandwidth, predicted.

Every device has one link, full duplex. A round takes one latency, and the time that the
busiest direction of the busiest link needs for its bytes; rounds follow each other.
Bytes and rounds are those of the schedules that the compiled programs execute.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.harness import plots
from experiments.harness.result import Rows
from jaxdp import algorithms
from jaxdp.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LATENCY_S = 20e-6  # of a round between hosts
SIZES = [4**power for power in range(5, 15)]  # bytes: 1 KiB to 256 MiB
RESNET50 = 25_557_032 * 4  # bytes of its gradients
STYLES = {  # colour, marker
    "1 server": ("#D55E00", "s"),
    "2 servers": ("#E69F00", "D"),
    "4 servers": ("#009E73", "^"),
    "ring": ("#0072B2", "o"),
}


def schedules(devices: int) -> dict[str, Schedule]:
    """What is compared."""
    return {
        "1 server": algorithms.sharded_servers(devices, 1),
        "2 servers": algorithms.sharded_servers(devices, min(2, devices)),
        "4 servers": algorithms.sharded_servers(devices, min(4, devices)),
        "ring": algorithms.ring(devices),
    }


def seconds(schedule: Schedule, nbytes: int, gbit_per_s: float) -> float:
    """The time of an all-reduce of `nbytes` bytes."""
    beta = 8e-9 / gbit_per_s
    total = 0.0
    for round_ in schedule.rounds:
        load = np.zeros((2, schedule.devices), int)  # chunks out, chunks in
        for transfer in round_.transfers:
            for source, target, _ in transfer:
                load[0, source] += 1
                load[1, target] += 1
        total += LATENCY_S + beta * load.max() * nbytes / schedule.chunks
    return total


def by_size(devices: int, gbit_per_s: float) -> Rows:
    """Times of everything against size."""
    sizes = {f"{size // 1024:,} KiB": size for size in SIZES}
    return [
        _row(name, devices, nbytes, gbit_per_s)
        for name, nbytes in (sizes | {"ResNet-50": RESNET50}).items()
    ]


def _row(name: str, devices: int, nbytes: int, gbit_per_s: float) -> dict[str, Any]:
    """Times of one size, and how many times longer one server takes than the ring."""
    times = {
        kind: 1e3 * seconds(schedule, nbytes, gbit_per_s)
        for kind, schedule in schedules(devices).items()
    }
    return {
        "gradients": name,
        "size_bytes": int(nbytes),
        **{f"{kind}_ms": time for kind, time in times.items()},
        "1 server / ring": times["1 server"] / times["ring"],
        "label": f"predicted, N = {devices}, {gbit_per_s:g} Gbit/s, 20 µs a round",
    }


def plot(rows: Rows, devices: int, gbit_per_s: float) -> "Figure":
    """Times against size, both on logarithmic scales."""
    note = f"predicted: N = {devices}, links of {gbit_per_s:g} Gbit/s and 20 µs"
    figure, axes = plots.plot(
        "Time of one exchange", "bytes of gradients Φ", "milliseconds", note
    )
    rows = sorted(rows, key=lambda row: row["size_bytes"])
    x = [row["size_bytes"] for row in rows]
    for name, (color, marker) in STYLES.items():
        y = [row[f"{name}_ms"] for row in rows]
        axes.plot(x, y, color=color, marker=marker, markersize=4, label=name)
    axes.set_xscale("log", base=10)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    return figure
