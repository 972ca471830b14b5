"""A bar for each stage of a step, one after the other in time."""

from typing import TYPE_CHECKING

from experiments.harness import plots
from experiments.harness.result import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "host": "#7b8794",
    "traffic": "#D55E00",
    "all devices": "#0072B2",
    "root only": "#F0B429",
    "whole step": "#1f2933",
}


def gantt(title: str, rows: Rows, note: str) -> "Figure":
    """Draws rows with `stage`, `work`, `median_ms`; a whole step starts at 0 again."""
    size = (8.0, 0.32 * len(rows) + 1.4)
    figure, axes = plots.plot(title, "time (ms)", "", note, size)
    ends = [0.0]
    for i, row in enumerate(rows):
        start = 0.0 if row["work"] == "whole step" else ends[-1]
        ends.append(start + row["median_ms"])
        axes.barh(i, row["median_ms"], 0.62, start, color=COLOURS[row["work"]])
        style = {"va": "center", "fontsize": 8, "color": plots.INK}
        axes.text(ends[-1], i, f"  {row['median_ms']:.2f}", **style)
    axes.set_xlim(0, 1.4 * max(ends))
    axes.set_yticks(range(len(rows)), [row["stage"] for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    for work in dict.fromkeys(row["work"] for row in rows):
        axes.barh(0, 0, color=COLOURS[work], label=work)
    axes.legend(frameon=False, loc="upper right", fontsize=8)
    return figure
