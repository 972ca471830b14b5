"""Figures of time against size, and of what is chosen."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import jaxdp
from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts.algorithms_prices import LARGEST, LEAST, NAMES, written
from experiments.parts.staleness_panels import finish, panels
from jaxdp.targets import Hardware

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours first; beyond all of them they come again, dashed.
COLORS = (
    *("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#7a5c00", "#b39b5a", "#8a8f94"),
    *("#CC79A7", "#009E73", "#4b3f72", "#1f2933"),
)
DASHES = ("-", "--", ":")
WIDTHS = {"ring": 3.4, "bidirectional_ring": 2.0}  # thinner ones lie upon them
PANEL = 4.7, 2.9  # inches
PER_OCTAVE = 3  # columns of the map
NATIVE_STYLE = {"color": plots.INK, "linestyle": "-.", "linewidth": 1.0}


def style(name: str) -> dict[str, Any]:
    """The line of an algorithm."""
    if name == "native":
        return NATIVE_STYLE
    place = NAMES.index(name)
    color, dash = COLORS[place % len(COLORS)], DASHES[place // len(COLORS)]
    return {"color": color, "linestyle": dash, "linewidth": WIDTHS.get(name, 1.2)}


def against_ring(
    title: str, machines: Mapping[str, Hardware], devices: int
) -> "Figure":
    """Predicted times in those of the ring, against size."""
    note = f"predicted for N = {devices}; below 1: quicker than the ring"
    figure, every = panels(title, note, [*machines], columns=2, size=PANEL)
    sizes = np.geomspace(LEAST, LARGEST, 61).astype(int)
    shown = set()
    for machine, axes in zip(machines.values(), every, strict=True):
        chosen = [jaxdp.choose_algorithm(int(s), devices, machine) for s in sizes]
        times = [{c.algorithm: c.seconds for c in each.candidates} for each in chosen]
        names = [name for name in NAMES if name in times[0]]
        shown |= {*names}
        for name in names:
            ratios = [each[name] / each["ring"] for each in times]
            axes.plot(sizes, ratios, **style(name))
        _sizes(axes)
        axes.set_ylim(0.03, 20)
        _ratios(axes)
    return _explained(
        figure,
        "buffer",
        "time, in that of the ring",
        _lines(sorted(shown, key=NAMES.index)),
    )


def chosen(
    title: str, machines: Mapping[str, Hardware], counts: Sequence[int]
) -> "Figure":
    """What is chosen, by N and size."""
    note = "the ring where it takes at most 5 % longer than the quickest"
    figure, every = panels(title, note, [*machines], columns=2, size=PANEL)
    columns = PER_OCTAVE * int(np.log2(LARGEST / LEAST))
    edges = np.geomspace(LEAST, LARGEST, columns + 1)
    middles = np.sqrt(edges[1:] * edges[:-1]).astype(int)
    colors = ListedColormap([COLORS[i % len(COLORS)] for i in range(len(NAMES))])
    seen = set()
    for machine, axes in zip(machines.values(), every, strict=True):
        cells = [
            [
                NAMES.index(jaxdp.choose_algorithm(int(size), n, machine).algorithm)
                for size in middles
            ]
            for n in counts
        ]
        seen |= {NAMES[cell] for row in cells for cell in row}
        rows = np.arange(len(counts) + 1) - 0.5
        last = len(NAMES) - 0.5
        axes.pcolormesh(edges, rows, cells, cmap=colors, vmin=-0.5, vmax=last)
        axes.set_yticks(range(len(counts)), [str(n) for n in counts])
        axes.grid(visible=False)
        _sizes(axes)
    patches = [
        Patch(color=colors(place), label=name)
        for place, name in enumerate(NAMES)
        if name in seen
    ]
    return _explained(figure, "buffer", "devices N", patches)


def measured(title: str, rows: Rows) -> "Figure":
    """Measured times in those of the ring, a plot for each N."""
    counts = [*dict.fromkeys(row["N"] for row in rows)]
    figure, every = panels(
        title, rows[0]["label"], [f"N = {n}" for n in counts], len(counts), (3.6, 3.2)
    )
    names = [*dict.fromkeys(row["algorithm"] for row in rows)]
    for devices, axes in zip(counts, every, strict=True):
        here = [row for row in rows if row["N"] == devices]
        of = {(row["algorithm"], row["size_bytes"]): row["median_ms"] for row in here}
        sizes = sorted({row["size_bytes"] for row in here})
        for name in names:
            timed = [size for size in sizes if (name, size) in of]
            ratios = [of[name, size] / of["ring", size] for size in timed]
            axes.plot(timed, ratios, marker=".", **style(name))
        _sizes(axes)
        axes.set_ylim(0.04, 40)
        _ratios(axes)
    return _explained(
        figure, "buffer", "median time, in that of the ring", _lines(names)
    )


def _sizes(axes: "Axes") -> None:
    """Sizes along the horizontal axis."""
    axes.set_xscale("log", base=2)
    low, high = (round(np.log2(edge)) for edge in axes.get_xlim())
    ticks = [2**power for power in range(10, 31, 4) if low <= power <= high]
    axes.set_xticks(ticks, [written(size) for size in ticks])
    axes.minorticks_off()


def _ratios(axes: "Axes") -> None:
    """Ratios along the vertical one."""
    axes.set_yscale("log")
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _lines(names: Iterable[str]) -> list[Line2D]:
    """What explains the lines of algorithms."""
    return [Line2D([], [], label=name, **style(name)) for name in names]


def _explained(
    figure: "Figure", x: str, y: str, handles: Sequence[Line2D | Patch]
) -> "Figure":
    """With a legend beside the plots."""
    finish(figure, x, y, legend=False)
    where = "outside right upper"
    figure.legend(handles=handles, loc=where, frameon=False, fontsize=8)
    return figure
