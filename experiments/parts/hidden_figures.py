"""Figures of steps before and after: timelines below each other, and bars by design."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts.hidden_steps import AFTER, BEFORE, RING, Step
from experiments.parts.staleness_panels import finish, panels
from jaxdp.draw.timeline import draw_timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPUTE, BESIDE, EXPOSED = "#0072B2", "#F0C9A8", "#D55E00"
BAR, HEADER = 0.3, 0.8  # inches


def timelines(steps: Sequence[Step]) -> "dict[str, Figure]":
    """The ring's step before and after, for each model and number of devices."""
    pairs: dict[str, dict[str, Step]] = {}
    for step in steps:
        if step.way.name == RING:
            place = f"{step.model} on {step.devices} devices"
            pairs.setdefault(place, {})[step.way.variant] = step
    return {
        f"Timelines of the ring, {place}": draw_timelines(
            {f"{place}, {name}": pair[name].fast for name in (BEFORE, AFTER)}
        )
        for place, pair in pairs.items()
    }


def shares(title: str, rows: Rows) -> "Figure":
    """What computes and what is exposed in the step of each design.

    Args:
        title: Of the figure.
        rows: Of `hidden_tables.times`, of several models and numbers of devices.
    """
    plotted: dict[str, list[Any]] = {}
    for row in rows:
        place = f"{row['model']} on {row['devices']} devices"
        plotted.setdefault(place, []).append(row)
    note = "predicted; percent: the share of the communication that is exposed"
    height = HEADER + BAR * max(map(len, plotted.values()))
    columns = min(2, len(plotted))
    figure, every = panels(title, note, [*plotted], columns, (5.2, height))
    for axes, own in zip(every, plotted.values(), strict=True):
        _bars(axes, own)
    return finish(figure, "step (ms)", "")


def _bars(axes: "Axes", rows: Rows) -> None:
    """A bar for each design: what it computes alone, beside transfers, and waits."""
    labels = [f"{row['design']}, {row['variant']}" for row in rows]
    exposed = [row["step_ms"] - row["compute_ms"] for row in rows]
    beside = [  # a device may also wait for another one, which communicates
        max(0.0, row["communication_ms"] - waits)
        for row, waits in zip(rows, exposed, strict=True)
    ]
    alone = [r["compute_ms"] - b for r, b in zip(rows, beside, strict=True)]
    pieces = {
        "computes": (alone, COMPUTE),
        "computes while it communicates": (beside, BESIDE),
        "exposed communication": (exposed, EXPOSED),
    }
    left = [0.0] * len(rows)
    for label, (lengths, colour) in pieces.items():
        axes.barh(range(len(rows)), lengths, 0.74, left, color=colour, label=label)
        left = [a + b for a, b in zip(left, lengths, strict=True)]
    style = {"va": "center", "fontsize": 7, "color": plots.INK}
    for place, row in enumerate(rows):
        text = f"  {row['step_ms']:.3g} ms, {row['exposed_fraction']:.0%}"
        axes.text(row["step_ms"], place, text, **style)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
