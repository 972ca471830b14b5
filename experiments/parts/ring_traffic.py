"""Bytes that a ring sends per device: in compiled programs, and in schedules.

`N` devices; `Φ` bytes in the whole buffer.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxdp
from experiments.harness import plots
from experiments.harness.result import Rows
from jaxdp import algorithms
from jaxdp.program import ProgramReport, analyze

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ELEMENTS = 840 * 312  # float32, about 1 MiB: a multiple of each N from 1 to 8
COLLECTIVES = {
    "reduce_scatter": lambda x: jaxdp.reduce_scatter(x[0], "data"),
    "all_gather": lambda x: jaxdp.all_gather(x[0], "data"),
    "all_reduce": lambda x: jaxdp.all_reduce(x[0], "data"),
}


@functools.cache
def compiled(collective: str, devices: int) -> jax.stages.Compiled:
    """A ring collective of a whole buffer of Φ bytes, compiled for N devices."""
    size = -(-ELEMENTS // devices) * devices
    given = size // devices if collective == "all_gather" else size
    out_specs = P("data") if collective == "reduce_scatter" else P()
    program = jax.shard_map(
        COLLECTIVES[collective],
        mesh=jaxdp.data_mesh(devices),
        in_specs=P("data"),
        out_specs=out_specs,
    )
    x = jax.ShapeDtypeStruct((devices, given), np.float32)
    return jax.jit(program).lower(x).compile()


def in_programs(devices: int, on_program: Callable[[], Any]) -> dict[str, Any]:
    """Counts what N devices send, in the compiled programs."""
    reports = {}
    for name in COLLECTIVES:
        reports[name] = analyze(compiled(name, devices))
        on_program()
    size = 4 * -(-ELEMENTS // devices) * devices
    rounds = reports["all_reduce"].count("collective-permute")
    sent = {name: _each(report) for name, report in reports.items()}
    return _row(devices, size, rounds, sent, "program")


def in_schedule(devices: int) -> dict[str, Any]:
    """Counts what N devices would send, in the schedule."""
    built = {
        "reduce_scatter": algorithms.ring_reduce_scatter(devices),
        "all_gather": algorithms.ring_all_gather(devices),
        "all_reduce": algorithms.ring(devices),
    }
    size = 4 * -(-ELEMENTS // devices) * devices
    sent = {}
    for name, schedule in built.items():
        sends = [0] * devices
        for round_ in schedule.rounds:
            for transfer in round_.transfers:
                for source, _ in transfer.pairs:
                    sends[source] += size // devices
        (sent[name],) = set(sends)
    return _row(devices, size, len(built["all_reduce"].rounds), sent, "schedule")


def plot(rows: Rows) -> "Figure":
    """Bytes per device against N, beside the formula and its bound."""
    figure, axes = plots.plot("Bytes sent per device", "devices N", "sent / Φ")
    n = np.geomspace(1, rows[-1]["devices"])
    color = plots.STYLES["ring"]["color"]
    axes.axhline(2, color=plots.MUTED, linestyle=":", label="bound 2")
    axes.plot(n, 2 * (n - 1) / n, color=color, label="2 (N - 1) / N")
    for counted, marker in (("program", "o"), ("schedule", "D")):
        chosen = [row for row in rows if row["counted_in"] == counted]
        x = [row["devices"] for row in chosen]
        y = [row["sent/Φ"] for row in chosen]
        face = color if counted == "program" else "white"
        style = {"color": color, "markerfacecolor": face, "linestyle": ""}
        axes.plot(x, y, marker=marker, label=f"counted in the {counted}", **style)
    plots.double_along_x(axes, [row["devices"] for row in rows])
    axes.set_ylim(-0.1, 2.2)
    axes.legend(frameon=False, loc="lower right")
    return figure


def _each(report: ProgramReport) -> int:
    """What each device sends, the same for all in a ring."""
    (sent,) = set(report.sent_bytes)
    return sent


def _row(
    devices: int, size: int, rounds: int, sent: dict[str, int], counted_in: str
) -> dict[str, Any]:
    """One N."""
    return {
        "devices": devices,
        "counted_in": counted_in,
        "rounds": rounds,
        "reduce_scatter_bytes": sent["reduce_scatter"],
        "all_gather_bytes": sent["all_gather"],
        "sent_bytes": sent["all_reduce"],
        "sent/Φ": sent["all_reduce"] / size,
        "2(N-1)/N": 2 * (devices - 1) / devices,
    }
