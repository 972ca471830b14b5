"""Figures of pipelines: who works when, bubbles, memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts.pipeline_runs import Run
from experiments.parts.pipeline_tables import formula
from experiments.parts.staleness_panels import finish, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD, BACKWARD, IDLE = "#0072B2", "#E69F00", "#eceff1"
LINES = {2: ("#009E73", "^"), 4: ("#0072B2", "o"), 8: ("#D55E00", "s")}  # by stages
OTHERS = ("#7b8794", "D")
LANE, WIDTH = 0.27, 8.6  # inches
LEAST_LABEL = 0.1  # inches of a tick that has room for a number


def gantt(title: str, runs: Sequence[Run]) -> "Figure":
    """Ticks by stage, a plot for each number of micro-batches, on one clock.

    A tick lasts 1/M of what the whole batch takes in a stage, forward as backward.
    """
    names = [_heading(run) for run in runs]
    note = (
        "as executed; number: micro-batch; grey: bubble; a tick is drawn as 1/M of "
        "what all rows take in a stage"
    )
    height = LANE * max(run.stages for run in runs) + 0.5
    figure, every = panels(title, note, names, columns=1, size=(WIDTH, height))
    longest = max(2 * _ticks(run) / run.microbatches for run in runs)
    for axes, run in zip(every, runs, strict=True):
        _lanes(axes, run, WIDTH * 0.93 / longest)
        axes.set_xlim(0, longest)
        axes.set_yticks(range(run.stages), [f"stage {p}" for p in range(run.stages)])
        axes.set_ylim(run.stages - 0.5, -0.5)
        axes.grid(visible=False)
    for label, colour in (("forward", FORWARD), ("backward", BACKWARD)):
        every[0].barh(-9, 0, color=colour, label=label)
    return finish(figure, "time, in that of one pass of all rows through a stage", "")


def bubbles(title: str, rows: Rows) -> "Figure":
    """The bubble against M: counted as marks, the formula as lines."""
    note = "marks: counted as programs ran; lines: (P-1)/(M+P-1)"
    figure, axes = plots.plot(title, "micro-batches M", "bubble (% of ticks)", note)
    every = sorted({row["micro-batches"] for row in rows})
    between = np.geomspace(every[0], every[-1], 60)
    for stages in sorted({row["stages"] for row in rows}):
        own = [row for row in rows if row["stages"] == stages]
        colour, marker = LINES.get(stages, OTHERS)
        axes.plot(between, [100 * formula(stages, m) for m in between], color=colour)
        x = [row["micro-batches"] for row in own]
        y = [100 * row["bubble"] for row in own]
        axes.plot(x, y, marker, color=colour, label=f"P = {stages}", linestyle="")
    _numbers(axes, every)
    axes.set_ylim(0, 100)
    axes.legend(frameon=False)
    return figure


def memory(title: str, rows: Rows, stages: int) -> "Figure":
    """What a device holds against M, with and without re-materialization."""
    note = f"temporaries of a device, P = {stages}, read from compiled programs"
    figure, axes = plots.plot(title, "micro-batches M", "MiB", note)
    x = [row["micro-batches"] for row in rows]
    shown = {
        "kept_mb": ("all kept", "#D55E00", "-", "s"),
        "re-materialized_mb": ("re-materialized", "#0072B2", "-", "o"),
        "stage inputs_mb": ("inputs of a stage alone", plots.MUTED, ":", None),
    }
    for column, (label, colour, line, marker) in shown.items():
        style = {"color": colour, "linestyle": line, "marker": marker, "label": label}
        axes.plot(x, [row[column] for row in rows], **style)
    _numbers(axes, x)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def _lanes(axes: "Axes", run: Run, tick_inches: float) -> None:
    """Ticks of both passes; the backward one visits them in reverse."""
    ticks, tick = _ticks(run), 1 / run.microbatches
    room = tick_inches * tick > LEAST_LABEL
    axes.barh(range(run.stages), 2 * ticks * tick, 0.84, color=IDLE)
    for stage, index in zip(*np.nonzero(run.found.forward), strict=True):
        number = run.found.forward[stage, index]
        _cell(axes, stage, index * tick, tick, FORWARD, str(number) if room else "")
        if run.found.backward[stage, index]:
            start = (2 * ticks - 1 - index) * tick
            _cell(axes, stage, start, tick, BACKWARD, str(number) if room else "")


def _cell(
    axes: "Axes", stage: int, start: float, tick: float, colour: str, text: str
) -> None:
    axes.barh(stage, tick, 0.84, start, color=colour, edgecolor="white", linewidth=0.6)
    ink = "white" if colour == FORWARD else plots.INK
    place = {"ha": "center", "va": "center", "fontsize": 7}
    axes.text(start + tick / 2, stage, text, color=ink, **place)


def _ticks(run: Run) -> int:
    return run.found.forward.shape[1]


def _heading(run: Run) -> str:
    words = "micro-batch" if run.microbatches == 1 else "micro-batches"
    idle = formula(run.stages, run.microbatches)
    return f"{run.microbatches} {words}: {100 * idle:.0f} % bubble"


def _numbers(axes: "Axes", numbers: Sequence[int]) -> None:
    """Writes numbers of micro-batches, each twice the one before."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
