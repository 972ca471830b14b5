"""Figures of buckets: when each may travel, and what micro-batches save."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from experiments.harness import plots
from experiments.harness.result import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAY, WAITS = "#0072B2", "#d9dee3"


def progress(
    title: str, waiting: Mapping[str, Sequence[int]], backward: int
) -> "Figure":
    """Draws, bucket by bucket, which part of the backward pass a bucket waits for.

    Args:
        title: Of the figure.
        waiting: By name of a program, for each bucket, how many multiplications it
            waits for.
        backward: How many there are.
    """
    note = "grey: a bucket's first permute waits for them; blue: they may run beside it"
    x = "matrix multiplications of the backward pass"
    figure, axes = plots.plot(title, x, "", note, size=(7.0, 4.2))
    labels, place = [], 0.0
    for name, counts in waiting.items():
        for i, count in enumerate(counts, start=1):
            axes.barh(place, count, color=WAITS, height=0.8)
            axes.barh(place, backward - count, left=count, color=MAY, height=0.8)
            style = {"va": "center", "fontsize": 8, "color": plots.INK}
            axes.text(0.15, place, f"waits for {count}", **style)
            labels.append((place, f"{name}, bucket {i}"))
            place += 1
        place += 0.6
    axes.set_yticks([p for p, _ in labels], [text for _, text in labels], fontsize=8)
    axes.set_xlim(0, backward)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


def per_row(title: str, rows: Rows) -> "Figure":
    """Draws the bytes sent per row of the batch against the micro-batches of a step."""
    note = "bytes that each device sends for a row of the global batch"
    figure, axes = plots.plot(title, "micro-batches k in a step", "KiB per row", note)
    counts = [row["micro-batches k"] for row in rows]
    sent = [row["sent per row_bytes"] / 1024 for row in rows]
    axes.plot(counts, sent, **plots.STYLES["ring"], label="counted in the program")
    ideal = [sent[0] / k for k in counts]
    style = {"color": plots.INK, "linestyle": (0, (1, 2)), "label": "1 / k"}
    axes.plot(counts, ideal, **style)
    axes.set_yscale("log", base=2)
    ticks = [
        t for t in (2.0**i for i in range(-8, 12)) if min(sent) / 2 <= t <= 2 * sent[0]
    ]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    plots.double_along_x(axes, counts)
    axes.legend(frameon=False)
    return figure
