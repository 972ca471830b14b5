"""Figures of what devices hold: stacked bars by part, and lines over a step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from experiments.harness import plots
from experiments.parts import footprint
from experiments.parts.footprint import MIB, TEMPORARY, Split
from jaxdp.replicated.views.memory import Memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common colour vision.
COLOURS = {
    footprint.PARAMETERS: "#0072B2",
    footprint.OPTIMIZER: "#E69F00",
    footprint.GRADIENTS: "#56B4E9",
    footprint.RECEIVED: "#D55E00",
    footprint.ACTIVATIONS: "#009E73",
    TEMPORARY: "#b5bfc9",
}
REST, REST_COLOUR = "everything else", plots.INK
UNDIVIDED, UNDIVIDED_COLOUR = "undivided", "#7b8794"
MAIN, OTHERS = "#D55E00", "#0072B2"
DASHES = ("--", ":", "-.")


class Bar(NamedTuple):
    """One bar: what holds something when, and how much, in parts or undivided."""

    label: str
    held: Split | float  # bytes


def bars(title: str, groups: Sequence[Sequence[Bar]], note: str) -> "Figure":
    """Draws groups of bars, one below the other."""
    places, labels, y = [], [], 0.0
    size = (9.0, 0.27 * sum(map(len, groups)) + 0.12 * len(groups) + 1.9)
    figure, axes = plots.plot(title, "MiB", "", note, size)
    for group in groups:
        for bar in group:
            _stack(axes, y, bar.held)
            places.append(y)
            labels.append(bar.label)
            y += 1
        y += 0.6
    shown = COLOURS | {REST: REST_COLOUR, UNDIVIDED: UNDIVIDED_COLOUR}
    plots.name_bars(axes, places, labels, shown)
    axes.set_ylim(y - 0.9, -0.7)
    axes.margins(x=0.12)
    return figure


def lines(title: str, memory: Memory, devices: Sequence[str], note: str) -> "Figure":
    """Draws what each device holds, moment by moment."""
    moments = footprint.moments(memory.snapshots)
    figure, axes = plots.plot(title, "", "MiB", note, (9.0, 4.6))
    for i, device in enumerate(devices):
        held = [moment.total(device) / MIB for moment in moments]
        axes.step(
            range(len(held)),
            held,
            where="mid",
            label=device,
            color=OTHERS if i else MAIN,
            linestyle=DASHES[i % len(DASHES)] if i else "-",
            linewidth=1.4 if i else 2.4,
        )
    stages = [moment.stage for moment in moments]
    starts = [i for i, stage in enumerate(stages) if stage not in stages[:i]]
    names = [stages[i] for i in starts]
    axes.set_xticks(starts, names, rotation=40, ha="right", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    return figure


def _stack(axes, y: float, held: Split | float) -> None:
    """One bar, part by part, with its total behind it."""
    if not isinstance(held, dict):
        pieces = [(held, UNDIVIDED_COLOUR)]
    else:
        pieces = [(held[part], colour) for part, colour in COLOURS.items()]
        rest = footprint.own_bytes(held) - sum(nbytes for nbytes, _ in pieces)
        pieces.append((rest, REST_COLOUR))
    left = 0.0
    for nbytes, colour in pieces:
        axes.barh(y, nbytes / MIB, 0.74, left, color=colour)
        left += nbytes / MIB
    text = {"va": "center", "fontsize": 8, "color": plots.INK}
    axes.text(left, y, f"  {left:,.0f}", **text)
