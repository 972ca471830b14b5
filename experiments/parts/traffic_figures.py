"""Figures of traffic: bytes of the busiest device, and bytes by link."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts import traffic_designs as designs
from experiments.parts import traffic_formulas as formulas
from experiments.parts.staleness_panels import finish, panels
from experiments.parts.traffic_counts import Counted
from experiments.parts.traffic_designs import Case, Way

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RED, BLUE = "#D55E00", "#0072B2"
# Colours tell closed forms apart, markers the designs that share one.
STYLES: Mapping[str, tuple[str, str, float]] = {  # colour, marker, size
    designs.PORT: (RED, "s", 10),
    designs.STAR: (RED, "o", 6),
    designs.ONE_SERVER: (RED, "x", 5),
    designs.SHARED: ("#E69F00", "D", 5),
    designs.APART: ("#7a5c00", "^", 6),
    designs.DOUBLING: ("#CC79A7", "v", 6),
    designs.RING: (BLUE, "o", 10),
    designs.NATIVE: (BLUE, "s", 5),
    designs.LOCAL: (BLUE, "x", 5),
    "ring, bf16": ("#56B4E9", "o", 5),
    "ring, int8": ("#009E73", "o", 5),
}
MAPPED = {
    designs.STAR: "gather to root, 1 server",
    designs.RING: "ring",
    designs.NATIVE: "native, as the ring that a runtime makes",
    designs.SHARED: designs.SHARED,
    designs.APART: f"{designs.DEDICATED} dedicated servers",
    designs.DOUBLING: "recursive doubling",
}


def busiest(title: str, ways: Mapping[str, Way], rows: Rows, note: str) -> "Figure":
    """What the busiest device sends, against N.

    Args:
        title: Of the figure.
        ways: By name, with their closed forms.
        rows: What was counted, for one gradient.
        note: Where.
    """
    note = f"lines: closed forms, of gradients alone; points: counted in steps {note}"
    figure, axes = plots.plot(title, "devices N", "sent / Φ", note, size=(9.0, 5.0))
    last = max(row["N"] for row in rows)
    for name, (color, marker, size) in STYLES.items():
        found = [row for row in rows if row["design"] == name and row["N"] > 1]
        if not found:
            continue
        x = [n for n in range(2, last + 1) if n >= ways[name].least]
        line = {"color": color, "linewidth": 1.0, "zorder": 1}
        axes.plot(x, [_sent(ways[name], n) for n in x], **line)
        axes.plot(
            [row["N"] for row in found],
            [row["counted_bytes"] / row["Φ_bytes"] for row in found],
            label=f"{name}: {ways[name].device}",
            color=color,
            marker=marker,
            markersize=size,
            markerfacecolor="none",
            linestyle="",
        )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plots.double_along_x(axes, sorted({row["N"] for row in rows if row["N"] > 1}))
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(frameon=False, fontsize=8, labelspacing=0.8, **place)
    return figure


def _sent(way: Way, devices: int) -> float:
    """Φ sent by the busiest device, by the closed form."""
    phi = 10**6  # elements; so many that no chunk's padding counts
    exchanges = way.exchanges(Case(devices, (phi,), (phi,)))
    sent = formulas.expected(exchanges, "most").gradient
    return float(sent) / (formulas.FLOAT * phi)


def links(title: str, counted: Mapping[str, Counted], phi: int) -> "Figure":
    """Bytes by source and target, a map for each design.

    Args:
        title: Of the figure.
        counted: By design.
        phi: Φ in bytes.
    """
    names = [name for name in MAPPED if name in counted]
    note = "Φ from each source (row) to each target (column); white: nothing at all"
    every = [MAPPED[name] for name in names]
    figure, axes = panels(title, note, every, columns=3, size=(3.3, 3.0))
    most = max(max(each.links.values(), default=0) for each in counted.values()) / phi
    for name, plot in zip(names, axes, strict=True):
        _map(plot, counted[name], phi, most)
    return finish(figure, "target", "source", legend=False)


def _map(axes: Any, counted: Counted, phi: int, most: float) -> None:
    """One map, with numbers in its cells."""
    devices = len(counted.sent)
    amounts = np.full((devices, devices), np.nan)
    for (source, target), amount in counted.links.items():
        if amount:
            amounts[source, target] = amount / phi
    axes.imshow(amounts, cmap="Blues", vmin=-0.1 * most, vmax=1.2 * most)
    for (source, target), amount in np.ndenumerate(amounts):
        if not np.isnan(amount):
            dark = amount > 0.75 * most
            style = {"ha": "center", "va": "center", "fontsize": 6.5}
            color = "white" if dark else plots.INK
            axes.text(target, source, f"{round(amount, 2):g}", color=color, **style)
    axes.set_xticks(range(devices))
    axes.set_yticks(range(devices))
    axes.grid(visible=False)
