"""Figures of designs side by side: what each costs, losses, and how far runs drift."""

import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.figure import Figure

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts import compare_designs as designs
from experiments.parts import lockstep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EARLY = 20  # steps in which designs must agree with one device ...
BOUND = 1e-5  # ... to this absolute difference of every parameter
# Okabe and Ito's colours, told apart with every common colour vision.
GREY, ORANGE, BLUE = "#7b8794", "#D55E00", "#0072B2"
GREEN, PINK, YELLOW = "#009E73", "#CC79A7", "#E69F00"
COLOURS = {
    lockstep.ALONE: "#c4ccd4",
    designs.ROOT: ORANGE,
    designs.SERVER: ORANGE,
    designs.RING: BLUE,
    designs.DOUBLING: BLUE,
    designs.HALVING: BLUE,
    designs.NATIVE: GREEN,
    designs.LOCAL: YELLOW,
    **dict.fromkeys(designs.STAGES.values(), PINK),
}
DASHES = {  # of designs with one colour
    designs.SERVER: "--",
    designs.DOUBLING: "--",
    designs.HALVING: ":",
    designs.STAGES[2]: "--",
    designs.STAGES[3]: ":",
}
# Lines that lie on top of each other, the widest at the bottom, in points.
WIDTHS = {
    lockstep.ALONE: 11,
    designs.ROOT: 8,
    designs.RING: 5.5,
    designs.NATIVE: 3.4,
    designs.STAGES[3]: 1.4,
    designs.LOCAL: 1.8,
}


class Panel(NamedTuple):
    """One measure of all designs."""

    title: str
    column: str  # of the table of designs
    shown: str = "{:.3g}"


PANELS = (
    Panel("busiest device sends (Φ)", "busiest (Φ)"),
    Panel("all devices send (Φ)", "all (Φ)"),
    Panel("rounds", "rounds", shown="{:g}"),
    Panel("kept between steps (MiB)", "kept_mb"),
    Panel("step here (ms)", "step_ms"),
)


def costs(title: str, rows: Rows) -> Figure:
    """A panel for each measure, a bar for each design."""
    note = rows[0]["label"]
    rows = [row for row in rows if row["design"] != lockstep.ALONE]
    size = (13.0, 0.3 * len(rows) + 1.7)
    figure = Figure(size, dpi=plots.DPI, facecolor="white", layout="constrained")
    left: dict[str, Any] = {"x": 0.01, "ha": "left"}
    figure.suptitle(title, fontsize=12, fontweight="bold", color=plots.INK, **left)
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for panel, each in zip(PANELS, axes, strict=True):
        _draw(each, panel, rows)
    axes[0].set_yticks(range(len(rows)), [row["design"] for row in rows], fontsize=9)
    axes[0].invert_yaxis()
    note = textwrap.fill(note, 170)
    figure.supxlabel(note, fontsize=8, color=plots.MUTED, **left)
    return figure


def _draw(axes: "Axes", panel: Panel, rows: Rows) -> None:
    """One panel; its values stand behind the bars."""
    for place, row in enumerate(rows):
        length = row[panel.column]
        axes.barh(place, length, 0.72, color=_colour(row["design"]))
        style: dict[str, Any] = {"va": "center", "fontsize": 8, "color": plots.INK}
        axes.text(length, place, "  " + panel.shown.format(length), **style)
    axes.set_title(panel.title, fontsize=9, color=plots.INK, loc="left")
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.tick_params(length=0, colors=plots.MUTED)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _colour(name: str) -> str:
    """Of a family of designs; all that has servers has one."""
    return COLOURS.get(name, ORANGE)


def losses(title: str, history: lockstep.History) -> Figure:
    """Some runs on top of each other, the widest line at the bottom."""
    shown = {name: width for name, width in WIDTHS.items() if name in history.losses}
    note = "runs lie on top of each other: later ones are drawn thinner"
    if designs.LOCAL in shown:
        note += f"; {designs.LOCAL} averages parameters, and trains otherwise"
    figure, axes = plots.plot(title, "step", "loss", note)
    for name, width in shown.items():
        values = history.losses[name]
        style: dict[str, Any] = {"color": _colour(name), "solid_capstyle": "round"}
        axes.plot(range(1, len(values) + 1), values, label=name, lw=width, **style)
    axes.set_ylim(bottom=-0.08)  # room for the widest line at 0
    axes.legend(frameon=False)
    return figure


def differences(title: str, history: lockstep.History) -> Figure:
    """How far runs are from the single device, on a logarithmic scale."""
    size = (9.0, 4.6)
    figure, axes = plots.plot(title, "step", "largest absolute difference", "", size)
    for name, values in history.differences.items():
        style: dict[str, Any] = {"color": _colour(name), "lw": 1.4}
        style["linestyle"] = DASHES.get(name, "-" if name in COLOURS else ":")
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    axes.plot(
        [1, EARLY],
        [BOUND, BOUND],
        color=plots.INK,
        lw=2,
        label=f"bound, first {EARLY} steps",
    )
    axes.set_yscale("log")
    figure.legend(frameon=False, loc="outside right center", fontsize=8)
    return figure
