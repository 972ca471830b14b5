"""Figures of uneven batches: how far from one device, masked everywhere and not."""

from typing import TYPE_CHECKING, Any

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts.uneven_mistakes import NO_NUMBER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOWHERE = 30.0  # where to draw what is no number
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": ""},
    {"color": "#D55E00", "marker": "s", "linestyle": ""},
    {"color": "#009E73", "marker": "^", "linestyle": ""},
)


def by_length(title: str, rows: Rows, bound: float) -> "Figure":
    """The largest gradient difference of every data set, on each number of devices."""
    note = (
        "largest difference of any entry, in any step, to one device on the real rows"
    )
    figure, axes = plots.plot(title, "rows of the data set", "difference", note)
    lengths = list(dict.fromkeys(row["rows"] for row in rows))
    counts = list(dict.fromkeys(row["devices"] for row in rows))
    for i, (count, style) in enumerate(zip(counts, STYLES, strict=False)):
        found = [row["gradient apart"] for row in rows if row["devices"] == count]
        places = [n + 0.1 * (2 * i + 1 - len(counts)) for n in range(len(found))]
        axes.plot(places, found, label=f"{count} devices", **style)
    axes.axhline(bound, color=plots.INK, linestyle=(0, (5, 2)), label="bound")
    last_bit = {"color": plots.MUTED, "linestyle": (0, (1, 1.5))}
    axes.axhline(2**-23, label="the last bit of 1 in float32", **last_bit)
    axes.set(yscale="log", ylim=(bound / 50, 3 * bound))
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    return figure


def of_mistakes(title: str, rows: Rows) -> "Figure":
    """The relative gradient difference of each way to treat padding."""
    note = "relative to the largest entry of the gradient; x: not a number"
    size = (8.0, 0.4 * len(rows) + 1.8)
    figure, axes = plots.plot(title, "difference to one device", "", note, size)
    _, *columns = rows[0]
    for i, (column, style) in enumerate(zip(columns, STYLES, strict=False)):
        for place, row in enumerate(rows):
            number = row[column] != NO_NUMBER
            shape: dict[str, Any] = style if number else style | {"marker": "x"}
            axes.plot(
                row[column] if number else NOWHERE,
                place + 0.2 * (i - (len(columns) - 1) / 2),
                label=column if place == 0 else None,
                **shape,
            )
    axes.axvline(NOWHERE / 3, color=plots.GRID)
    axes.set(xscale="log", xlim=(2e-8, 2 * NOWHERE))
    axes.set_yticks(range(len(rows)), [row["padding"] for row in rows])
    axes.invert_yaxis()
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=8)
    return figure
