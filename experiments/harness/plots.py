"""One look for all plots."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart with every common colour vision; each name also
# has a dash and a marker of its own.
STYLES = {
    "single device": {"color": "#c4ccd4", "linestyle": ":", "marker": None},
    "ring": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "star": {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    "native": {"color": "#009E73", "linestyle": "-.", "marker": "^"},
}
INK, MUTED, GRID = "#1f2933", "#52606d", "#d9dee3"
DPI = 180


def plot(
    title: str,
    x: str,
    y: str,
    note: str = "",
    size: tuple[float, float] = (7.0, 4.0),
) -> tuple[Figure, "Axes"]:
    """An empty plot.

    Args:
        title: Short; the figure's only heading.
        x: What the horizontal axis shows, with its unit.
        y: The same of the vertical axis.
        note: Small print below the title.
        size: Width and height in inches.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)  # inches
    figure = Figure(size, dpi=DPI, facecolor="white", layout=layout)
    axes = figure.subplots()
    style = {"loc": "left", "fontsize": 12, "fontweight": "bold", "color": INK}
    axes.set_title(title, pad=24 if note else 10, **style)
    small = {"fontsize": 8, "color": MUTED, "transform": axes.transAxes}
    axes.text(0, 1.03, note, **small)
    axes.set_xlabel(x, color=MUTED)
    axes.set_ylabel(y, color=MUTED)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    return figure, axes


def name_bars(
    axes: "Axes",
    places: Sequence[float],
    names: Sequence[str],
    colours: Mapping[str, str],
    columns: int = 4,
) -> None:
    """Names horizontal bars beside the plot, and what colours mean below it.

    Args:
        axes: Of a figure with nothing else.
        places: Of the bars along the vertical axis.
        names: Of the bars.
        colours: By what they stand for.
        columns: Of the legend.
    """
    axes.set_yticks(places, names, fontsize=8)
    axes.grid(axis="y", visible=False)
    for meaning, colour in colours.items():
        axes.barh(0, 0, color=colour, label=meaning)
    where = {"loc": "outside lower center", "ncols": columns, "fontsize": 8}
    axes.figure.legend(frameon=False, **where)


def double_along_x(axes: "Axes", numbers: Sequence[int]) -> None:
    """Spaces numbers by their ratios, and writes those given; the last of the scales.

    Matplotlib forgets that there are no minor ticks when a scale is set.
    """
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
