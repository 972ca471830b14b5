"""Figures of compressed runs: losses over steps, and what loss costs how many bytes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.harness import plots
from experiments.parts.compression_runs import UNCOMPRESSED, Runs
from experiments.parts.compression_tables import PARTS, curve
from experiments.parts.staleness_panels import finish, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One of Okabe and Ito's colours for each kind of compression.
STYLES: Mapping[str, dict[str, Any]] = {
    UNCOMPRESSED: {"color": "#9aa5b1", "marker": "o", "linewidth": 6},
    "Bf16": {"color": "#0072B2", "marker": "s", "linewidth": 3.5},
    "Fp16": {"color": "#0072B2", "marker": "D", "linestyle": "--"},
    "Int8": {"color": "#009E73", "marker": "^"},
    "Int8 stochastic": {"color": "#009E73", "marker": "v", "linestyle": "--"},
    "TopK 5 %": {"color": "#D55E00", "marker": "P", "linestyle": "--"},
    "TopK 1 %": {"color": "#D55E00", "marker": "X"},
    "PowerSGD 4": {"color": "#CC79A7", "marker": "<"},
    "PowerSGD 2": {"color": "#CC79A7", "marker": ">", "linestyle": "--"},
    "PowerSGD 4, Bf16": {"color": "#CC79A7", "marker": "*", "linestyle": ":"},
}
SIZE = (4.6, 3.2)


def losses(title: str, runs: Runs) -> "Figure":
    """A panel for each task, a line for each compression."""
    note = f"mean of every {PARTS}th part of a run; thin lines lie on thick ones"
    figure, every = panels(title, note, _tasks(runs), 2, SIZE)
    for axes, task in zip(every, _tasks(runs), strict=True):
        for name, run in _of(runs, task).items():
            ends, means = zip(*curve(run), strict=True)
            style: dict[str, Any] = {**STYLES[name], "marker": None}
            axes.plot(ends, means, label=name, **style)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}" if min(means) > 1 else "")
    return _explained(finish(figure, "step", "training loss", legend=False))


def bytes_and_loss(title: str, runs: Runs) -> "Figure":
    """A panel for each task, a point for each compression."""
    note = "what a device sends in a step, from the compiled program, and what it gets"
    figure, every = panels(title, note, _tasks(runs), 2, SIZE)
    for axes, task in zip(every, _tasks(runs), strict=True):
        for name, run in _of(runs, task).items():
            style = STYLES[name] | {"linestyle": "", "markersize": 8}
            axes.plot(run.sent_bytes / 1e3, run.test_loss, label=name, **style)
        axes.axhline(runs[task, UNCOMPRESSED].test_loss, color=plots.GRID, zorder=0)
        axes.set_xscale("log")
    return _explained(finish(figure, "kB per step", "test loss", legend=False))


def sent(title: str, runs: Runs, formula: Mapping[tuple[str, str], float]) -> "Figure":
    """A panel for each task, a bar for each compression."""
    note = "per step and device; bars: compiled program; lines: formula without padding"
    figure, every = panels(title, note, _tasks(runs), 2, SIZE)
    for axes, task in zip(every, _tasks(runs), strict=True):
        most = runs[task, UNCOMPRESSED].sent_bytes
        for place, (name, run) in enumerate(_of(runs, task).items()):
            share = run.sent_bytes / most
            axes.barh(place, 100 * share, 0.7, color=STYLES[name]["color"], alpha=0.8)
            ends = place - 0.35, place + 0.35
            axes.vlines(100 * formula[task, name] / most, *ends, color=plots.INK)
            text = f"1/{1 / share:.1f}" if share < 1 else f"{most:,} bytes"
            style: dict[str, Any] = {"va": "center", "fontsize": 8, "color": plots.INK}
            axes.text(100 * share + 2, place, text, **style)
        names = [*_of(runs, task)]
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(right=135)  # room for what stands beside the longest bar
        axes.invert_yaxis()
    return finish(figure, "% of the bytes without compression", "", legend=False)


def _tasks(runs: Runs) -> list[str]:
    return list(dict.fromkeys(task for task, _ in runs))


def _of(runs: Runs, task: str) -> dict[str, Any]:
    """The runs of a task by compression."""
    return {name: run for (of, name), run in runs.items() if of == task}


def _explained(figure: "Figure") -> "Figure":
    """Names the lines of the first panel, which has them all, beside the last."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    style: dict[str, Any] = {"frameon": False, "fontsize": 8}
    figure.legend(handles, labels, loc="outside right upper", **style)
    return figure
