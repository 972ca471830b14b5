"""Figures of hidden communication: step times by bandwidth, and both streams."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.harness import plots
from experiments.parts.overlap_findings import PULL, PUSH, Predicted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINKS_GB_S = (12.5, 900.0)  # 100 Gbit/s Ethernet to the NVLink of the next generation
COLOURS = {
    "matrix product": "#0072B2",
    "other kernel": "#56B4E9",
    PUSH: "#D55E00",
    PULL: "#E69F00",
}
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#D55E00", "linestyle": "--"},
    {"color": "#56B4E9", "linestyle": "-."},
    {"color": "#0072B2", "linestyle": "-"},
)
BOUNDS: tuple[dict[str, Any], ...] = (
    {"color": plots.INK, "linestyle": (0, (1, 1.5))},
    {"color": plots.MUTED, "linestyle": (0, (5, 1.5, 1, 1.5))},
)


def by_bandwidth(
    title: str,
    note: str,
    bounds: Mapping[str, Callable[[float], float]],
    scheduled: Mapping[str, Callable[[float], float]],
    marked: Mapping[str, float],
) -> "Figure":
    """Draws predicted step times against the bandwidth of a link.

    Args:
        title: Of the figure.
        note: Small print below it.
        bounds: Step times in seconds by link in bytes/s, that dependences allow.
        scheduled: The same, of what XLA scheduled.
        marked: Links to point out, in GB/s.
    """
    figure, axes = plots.plot(title, "link (GB/s each way)", "step (ms)", note)
    links = np.geomspace(*LINKS_GB_S, 60)
    lines = [*zip(scheduled.items(), STYLES, strict=False)]
    lines += zip(bounds.items(), BOUNDS, strict=False)
    for (name, step_s), style in lines:
        steps = [1e3 * step_s(1e9 * link) for link in links]
        axes.plot(links, steps, label=name, linewidth=1.6, **style)
    axes.set(xscale="log", yscale="log")
    for name, link in marked.items():
        axes.axvline(link, color=plots.GRID, zorder=0)
        where = {"xy": (link, 0.98), "xycoords": ("data", "axes fraction")}
        style = {"fontsize": 8, "color": plots.MUTED, "ha": "right", "va": "top"}
        axes.annotate(f"{name} ", rotation=90, **where, **style)
    axes.set_xticks([12.5, 25, 50, 100, 200, 450, 900])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return figure


def both_streams(title: str, note: str, steps: Sequence[Predicted]) -> "Figure":
    """Draws what the two streams of the server do in a step, one step below another."""
    size = (9.0, 0.95 * len(steps) + 1.5)
    figure, axes = plots.plot(title, "time in the step (ms)", "", note, size)
    places, labels = [], []
    for row, predicted in enumerate(steps):
        step, directions = predicted.step, predicted.directions
        lanes = {"compute": 2.6 * row, "communication": 2.6 * row + 1}
        for bar in step.bars:
            axes.barh(
                lanes[bar.stream],
                1e3 * (bar.end_s - bar.start_s),
                0.84,
                1e3 * bar.start_s,
                color=COLOURS[directions.get(bar.name, bar.kind)],
                edgecolor="white",
                linewidth=0.5,
            )
        places += lanes.values()
        labels += [f"{predicted.name}: compute", "communication"]
        end = {"color": plots.INK, "linewidth": 1.2}
        low, high = lanes["compute"] - 0.5, lanes["communication"] + 0.5
        axes.plot([1e3 * step.step_s] * 2, [low, high], **end)
    plots.name_bars(axes, places, labels, COLOURS)
    axes.set_ylim(max(places) + 0.7, -0.7)
    return figure
