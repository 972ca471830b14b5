"""Small plots beside and below each other, in the look of all plots."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from experiments.harness import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER, MARGIN = 0.86, 0.12  # inches


def panels(
    title: str,
    note: str,
    names: Sequence[str],
    columns: int,
    size: tuple[float, float] = (3.0, 2.1),
) -> tuple[Figure, list["Axes"]]:
    """An empty plot for each name, row by row.

    Args:
        title: Short; the figure's only heading.
        note: Small print below the title.
        names: Of the plots.
        columns: How many stand beside each other.
        size: Width and height of each in inches.
    """
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    width, height = size[0] * columns, size[1] * rows + HEADER + 0.2
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - HEADER / height))
    figure = Figure((width, height), dpi=plots.DPI, facecolor="white", layout=layout)
    heading: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "va": "top"}
    left, small = MARGIN / width, heading | {"fontsize": 8, "fontweight": "normal"}
    figure.text(left, 1 - MARGIN / height, title, color=plots.INK, **heading)
    figure.text(left, 1 - (MARGIN + 0.25) / height, note, color=plots.MUTED, **small)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    every = [*grid]
    for name, axes in zip(names, every, strict=True):
        axes.set_title(name, loc="left", fontsize=9, color=plots.INK)
        axes.grid(color=plots.GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", colors=plots.MUTED, length=0, labelsize=8)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(plots.GRID)
    return figure, every


def finish(figure: Figure, x: str, y: str, legend: bool = True) -> Figure:
    """Names what the axes show, and explains the lines above all plots."""
    style = {"fontsize": 9, "color": plots.MUTED}
    figure.supxlabel(x, **style)
    figure.supylabel(y, **style)
    if legend:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        width, height = figure.get_size_inches()
        place = MARGIN / width, 1 - (MARGIN + 0.42) / height
        where = {"loc": "upper left", "bbox_to_anchor": place, "ncols": len(labels)}
        style = {"frameon": False, "fontsize": 8, "borderpad": 0, "borderaxespad": 0}
        figure.legend(handles, labels, **where, **style)
    return figure
