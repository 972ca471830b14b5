"""Figures of throughput against the number of devices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.harness import plots
from experiments.parts.scaling_hardware import hosted
from experiments.parts.scaling_tables import DDP, DP, NATIVE, Curve
from experiments.parts.staleness_panels import finish, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    DP: "DP: everything through one device",
    DDP: "DDP: a ring, in buckets",
    NATIVE: "XLA's all-reduce",
}
STYLES = {DP: plots.STYLES["star"], DDP: plots.STYLES["ring"]}
STYLES[NATIVE] = plots.STYLES["native"]


def speedups(title: str, curves: Sequence[Curve]) -> "Figure":
    """Throughput in that of one device; hollow where `nn.DataParallel` does not exist.

    Args:
        title: Of the figure.
        curves: Of one model.
    """
    note = "predicted; grey: N times one device; hollow: if DataParallel went that far"
    names = [curve.hardware for curve in curves]
    figure, every = panels(title, note, names, columns=3, size=(3.3, 2.7))
    for curve, axes in zip(curves, every, strict=True):
        counts = curve.counts
        axes.plot(counts, counts, color=plots.MUTED, linewidth=0.8, linestyle=":")
        for design, label in LABELS.items():
            style = {**STYLES[design], "markersize": 4, "linewidth": 1.2}
            times = curve.times(design)
            if design == DP:
                style["markerfacecolor"] = "white"
            axes.plot(counts, times, label=label, **style)
            if design == DP:
                inside = [n for n in counts if n <= hosted(curve.hardware)]
                solid = {"linestyle": "", "marker": "s", "markersize": 4, "zorder": 3}
                found = times[: len(inside)]
                axes.plot(inside, found, color=STYLES[DP]["color"], **solid)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        plots.double_along_x(axes, counts[::2])
    return finish(figure, "devices N", "throughput, in that of one device")
