"""One look for all plots."""

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
