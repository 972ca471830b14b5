"""Figures of stages: what a device holds, by kind and against N, and losses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts import lockstep
from experiments.parts import zero_formulas as formulas
from experiments.parts import zero_steps as steps
from experiments.parts import zero_training as training
from experiments.parts.zero_formulas import GRADIENTS, PARAMETERS, STATE
from experiments.parts.zero_steps import Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
# Okabe and Ito's colours, told apart with every common colour vision.
COLOURS = {
    PARAMETERS: "#0072B2",
    GRADIENTS: "#56B4E9",
    STATE: "#E69F00",
    steps.COPIES: "#CC79A7",
    steps.ACTIVATIONS: "#009E73",
    steps.REST: "#b5bfc9",
}
LINES = {  # colour, marker and dash of a stage
    0: ("#7b8794", "o", ":"),
    1: ("#E69F00", "s", "--"),
    2: ("#0072B2", "^", "-."),
    3: ("#D55E00", "D", "-"),
}
WIDTHS = (9, 6, 3.4, 1.2)  # points, of lines that lie on top of each other


def bars(title: str, found: Sequence[Step], note: str) -> "Figure":
    """A bar for each stage and N, by kind; the formula as a mark."""
    numbers = sorted({step.devices for step in found})
    note = f"{note}; black: the formula, of parameters, gradients and optimizer state"
    size = (9.0, 0.3 * len(found) + 0.15 * len(numbers) + 1.8)
    figure, axes = plots.plot(title, "MiB on a device", "", note, size)
    places, labels, y = [], [], 0.0
    for n in numbers:
        for step in (step for step in found if step.devices == n):
            _stack(axes, y, step)
            places.append(y)
            labels.append(f"N = {n}, stage {step.stage}")
            y += 1
        y += 0.5
    plots.name_bars(axes, places, labels, COLOURS, columns=3)
    axes.set_ylim(y - 0.9, -0.7)
    axes.margins(x=0.1)
    return figure


def _stack(axes, y: float, step: Step) -> None:
    """One bar, its total behind it."""
    left = 0.0
    for kind, colour in COLOURS.items():
        size = step.held[kind] / MIB
        axes.barh(y, size, 0.74, left, color=colour)
        left += size
    expected = _formula(step.stage, step, step.devices)
    axes.plot([expected] * 2, [y - 0.42, y + 0.42], color="black", linewidth=1.8)
    style = {"va": "center", "fontsize": 8, "color": plots.INK}
    axes.text(max(left, expected), y, f"  {left:,.0f}", **style)


def against_n(title: str, found: Sequence[Step], note: str) -> "Figure":
    """Model states against N: formulas as lines, counts as markers."""
    note = f"{note}; parameters, gradients and optimizer state; lines: formulas"
    y = "MiB on a device"
    figure, axes = plots.plot(title, "devices N", y, note, (8.0, 4.6))
    numbers = sorted({step.devices for step in found})
    for stage, (colour, marker, dash) in LINES.items():
        own = [step for step in found if step.stage == stage]
        line = [_formula(stage, own[0], n) for n in numbers]
        counted = [sum(step.held[k] for k in formulas.KINDS) / MIB for step in own]
        axes.plot(numbers, line, color=colour, linestyle=dash, linewidth=1.4)
        axes.plot(
            [step.devices for step in own],
            counted,
            label=training.NAMES[stage] if stage else "stage 0: plain",
            color=colour,
            marker=marker,
            markerfacecolor="none",
            linestyle="",
        )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plots.double_along_x(axes, numbers)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _formula(stage: int, step: Step, n: int) -> float:
    """MiB."""
    return sum(formulas.held(stage, sum(step.leaves), n).values()) / MIB


def losses(title: str, history: lockstep.History, apart: Rows) -> "Figure":
    """All stages on top of each other, the widest line at the bottom."""
    most = max(row["largest difference to DDP"] for row in apart)
    note = "stages lie on top of each other: later ones are drawn thinner; "
    note += f"largest difference to DDP {most:.1e}"
    figure, axes = plots.plot(title, "step", "loss", note)
    for width, (stage, name) in zip(WIDTHS, training.NAMES.items(), strict=True):
        values = history.losses[name]
        style: Any = {"color": LINES[stage][0], "solid_capstyle": "round"}
        axes.plot(range(1, len(values) + 1), values, label=name, lw=width, **style)
    axes.set_ylim(bottom=-0.08)  # room for the widest line at 0
    axes.legend(frameon=False)
    return figure
