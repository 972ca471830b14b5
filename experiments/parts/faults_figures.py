"""The figure of faults: how far a training is, against time, with every kill."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.harness import plots
from experiments.harness.result import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Log = Sequence[tuple[float, int]]  # seconds since the launch, and the step then done
MARKERS = {"in a step": "o", "in a save": "s", "at start-up": "^"}
KILLED = "#D55E00"


def timeline(title: str, note: str, without: Log, log: Log, kills: Rows) -> "Figure":
    """Steps against seconds.

    Args:
        title: Of the figure.
        note: Small print.
        without: Of the training without faults.
        log: Of the training with kills.
        kills: Rows of kills.
    """
    figure, axes = plots.plot(title, "seconds since the launch", "step", note)
    plain: dict[str, Any] = {"color": plots.MUTED, "linestyle": "--"}
    axes.plot(*_lines(without, []), label="without faults", **plain)
    ring = plots.STYLES["ring"]["color"]
    axes.plot(*_lines(log, kills), label="with kills", color=ring)
    for moment, marker in MARKERS.items():
        chosen = [row for row in kills if row["moment"] == moment]
        if chosen:
            axes.plot(
                [row["at_s"] for row in chosen],
                [row["last step"] for row in chosen],
                linestyle="",
                marker=marker,
                color=KILLED,
                markersize=5,
                label=f"killed {moment}",
            )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _lines(log: Log, kills: Rows) -> tuple[list[float], list[float]]:
    """Points of a line that is broken wherever a training was killed."""
    seconds: list[float] = []
    steps: list[float] = []
    for second, step in log:
        before = seconds[-1] if seconds else second
        if any(before < row["at_s"] <= second for row in kills):
            seconds.append(float("nan"))
            steps.append(float("nan"))
        seconds.append(second)
        steps.append(step)
    return seconds, steps
