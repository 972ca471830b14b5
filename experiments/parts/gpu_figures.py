"""Figures of compiled steps: time, memory and bytes, design by design."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from experiments.harness import plots
from experiments.parts.gpu_steps import Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE, EXPOSED, HIDDEN = "#0072B2", "#D55E00", "#F0C9A8"
SENT, BUSIEST = "#56B4E9", "#0072B2"
# Okabe and Ito's colours, told apart with every common colour vision.
KINDS = (
    *("#0072B2", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#F0E442"),
    *("#b5bfc9", "#7b8794"),
)
Pieces = Sequence[tuple[str, float, str]]  # label, length, colour


def step_times(title: str, steps: Sequence[Step], note: str) -> "Figure":
    """Draws what computation and exposed communication make of a step."""

    def pieces(step: Step) -> Pieces:
        timeline = step.timeline
        hidden = timeline.communication_s - timeline.exposed_s
        return [
            ("computation", 1e3 * (timeline.compute_s - hidden), COMPUTE),
            ("computation beside communication", 1e3 * hidden, HIDDEN),
            ("exposed communication", 1e3 * timeline.exposed_s, EXPOSED),
        ]

    return _bars(title, steps, "step (ms)", note, pieces, "{:.3g}")


def traffic(title: str, steps: Sequence[Step], note: str) -> "Figure":
    """Draws the bytes that the busiest device sends."""

    def pieces(step: Step) -> Pieces:
        sent = step.report.sent_bytes
        least = min(sent) / 1e6
        return [
            ("sent by every device", least, SENT),
            ("sent by the busiest device besides", max(sent) / 1e6 - least, BUSIEST),
        ]

    return _bars(title, steps, "MB sent in a step", note, pieces, "{:,.4g}")


def memory(title: str, steps: Sequence[Step], note: str) -> "Figure":
    """Draws what a device holds when it holds most, by kind."""
    kinds = list(dict.fromkeys(kind for step in steps for kind in step.held_bytes))
    colours = dict(zip(kinds, KINDS, strict=False))

    def pieces(step: Step) -> Pieces:
        return [
            (kind, size / 2**30, colours[kind])
            for kind, size in step.held_bytes.items()
        ]

    return _bars(title, steps, "GiB", note, pieces, "{:.3g}")


def _bars(
    title: str,
    steps: Sequence[Step],
    x: str,
    note: str,
    pieces: Callable[[Step], Pieces],
    shown: str,
) -> "Figure":
    """A bar for each design, its total behind it."""
    size = (9.0, 0.34 * len(steps) + 1.7)
    figure, axes = plots.plot(title, x, "", note, size)
    labels: dict[str, str] = {}
    for place, step in enumerate(steps):
        left = 0.0
        for label, length, colour in pieces(step):
            axes.barh(place, length, 0.74, left, color=colour)
            left += length
            labels[label] = colour
        style = {"va": "center", "fontsize": 8, "color": plots.INK}
        axes.text(left, place, f"  {shown.format(left)}", **style)
    names = [step.design_name for step in steps]
    plots.name_bars(axes, range(len(steps)), names, labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    return figure
