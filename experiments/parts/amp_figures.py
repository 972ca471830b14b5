"""Figures of memory, of what float16 loses, and of a loss scale at work."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts.amp_underflow import SCALED, Run
from experiments.parts.staleness_panels import finish, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common colour vision.
PARTS = {
    "kept in 32 bits": "#0072B2",
    "kept in 16 bits": "#56B4E9",
    "kept masks": "#009E73",
    "parameters": "#7b8794",
    "gradients": "#b5bfc9",
    "optimizer state": "#E69F00",
}
STYLES: Mapping[str, dict[str, Any]] = {
    "f32": {"color": "#b5bfc9", "linewidth": 4},
    "bf16": {"color": "#009E73", "linewidth": 1.6, "linestyle": "--"},
    "fp16": {"color": "#D55E00", "linewidth": 2},
    SCALED: {"color": "#0072B2", "linewidth": 1.6},
}
SMOOTH = 20  # steps whose mean is drawn


def memory(rows: Rows) -> "Figure":
    """What a device holds in a step, part by part."""
    note = "kept: by the forward pass for the backward pass, in the traced program"
    size = (9.0, 0.42 * len(rows) + 1.9)
    figure, axes = plots.plot("Memory of a training step", "MiB", "", note, size)
    places = []
    for i, row in enumerate(rows):
        y, left = i + 0.6 * (i // 3), 0.0
        places.append(y)
        for part, color in PARTS.items():
            size_mb = row[f"{part}_mb"]
            axes.barh(y, size_mb, 0.74, left, color=color, label=None if i else part)
            left += size_mb
        saved, less = row["saved, all (%)"], ""
        if i % 3:
            less = f", {abs(saved):.0f} % {'less' if saved > 0 else 'more'}"
        text = {"va": "center", "fontsize": 8, "color": plots.INK}
        axes.text(left, y, f"  {left:,.0f}{less}", **text)
    names = [f"{row['model'].split(',')[0]}, {row['way']}" for row in rows]
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(axis="y", visible=False)
    figure.legend(frameon=False, loc="outside lower center", ncols=6, fontsize=8)
    return figure


def flushed(rows: Rows) -> "Figure":
    """Shares of gradients that are zero in float16, by loss scale."""
    figure, axes = plots.plot(
        "Gradients that float16 makes zero",
        "loss scale",
        "% of the elements that are not zero in float32",
        "a deep sigmoid network before its first step; crosses: something overflows",
    )
    columns = {"first layer": "#D55E00", "all layers": "#0072B2"}
    x = np.arange(len(rows))
    for column, color in columns.items():
        y = np.array([row[f"{column}, zero (%)"] for row in rows])
        finite = np.array([row["finite"] for row in rows])
        axes.plot(x, y, color=color, linewidth=1.4)
        axes.plot(x[finite], y[finite], "o", color=color, label=column)
        axes.plot(x[~finite], y[~finite], "x", color=color)
    labels = [f"$2^{{{row['loss scale'].removeprefix('2^')}}}$" for row in rows]
    axes.set_xticks(x, labels)
    axes.legend(frameon=False)
    return figure


def training(runs: Mapping[str, Run]) -> "Figure":
    """The loss of each run; the loss scale below it."""
    note = f"means of {SMOOTH} steps; crosses: skipped steps"
    names = ["loss", "loss scale of the scaled run"]
    figure, (top, bottom) = panels("Loss scaling at work", note, names, 1, (7.2, 2.1))
    for name, run in runs.items():
        width = min(SMOOTH, len(run.losses))
        mean = np.convolve(run.losses, np.ones(width) / width, mode="valid")
        steps = np.arange(len(mean)) + width
        top.plot(steps, mean, label=name, **STYLES[name])
    scaled = runs[SCALED]
    steps, scales = np.arange(1, len(scaled.scales) + 1), np.array(scaled.scales)
    skipped = np.array(scaled.skipped)
    bottom.step(steps, scales, where="post", color=STYLES[SCALED]["color"])
    bottom.plot(steps[skipped], scales[skipped], "x", color=STYLES["fp16"]["color"])
    bottom.set_yscale("log", base=2)
    for axes in (top, bottom):
        axes.set_xlim(0, len(scaled.losses))
    return finish(figure, "step", "")
