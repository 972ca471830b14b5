"""The ledger as one picture: claims, verdicts, and how far off the numbers are."""

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from experiments.harness import plots, wording
from experiments.ledger.judging import NONE, Judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "holds": "#009E73",
    "partly": "#B07A00",
    "refuted": "#D55E00",
    NONE: plots.MUTED,
}
MARKERS = {"holds": "o", "partly": "D", "refuted": "X"}
WIDTH, HEAD, ROW, FOOT = 11.0, 1.0, 0.36, 0.5  # inches
STRIP = 0.76  # where the plot begins, in parts of the width
COLUMNS = {"claim": 0.0, "": 0.06, "verdict": 0.44, "claimed": 0.54, "measured": 0.76}
SMALL = {"fontsize": 8.5, "color": plots.MUTED}
ABOVE = {"xycoords": "axes fraction", "textcoords": "offset points"}
WIDE = {"claimed": 30, "measured": 34}  # characters of a line
UNIT = 66
TITLE = "The ledger at a glance"
NUMBER = r"-?\d[\d,]*\.?\d*(?:e-?\d+)?"
RANGE = re.compile(
    rf"(?:about |above )?({NUMBER})(?: %)?(?:,? (?:to|and|or) ({NUMBER}))?\b"
)


def interval(given: Any) -> tuple[float, float] | None:
    """The numbers that a cell begins with, as least and most; None if it has none."""
    if wording.is_number(given):
        return float(given), float(given)
    found = RANGE.match(str(given))
    if not found:
        return None
    low, high = (
        float(text.replace(",", "")) for text in (found[1], found[2] or found[1])
    )
    return min(low, high), max(low, high)


def apart(claimed: tuple[float, float], measured: float) -> float:
    """How far a number is from what is claimed, of the larger one: -1 to 1.

    It is 0 inside of what is claimed, 1 where something is and nothing was claimed, and
    -1 where nothing is, or the opposite, and something was claimed.
    """
    low, high = claimed
    nearest = min(max(measured, low), high)
    largest = max(abs(measured), abs(nearest))
    return max(-1.0, min((measured - nearest) / largest, 1.0)) if largest else 0.0


def glance(judged: Sequence[Judged]) -> Figure:
    """All claims below each other, each with how far its number is from the claim."""
    height = HEAD + ROW * len(judged) + FOOT
    figure = Figure((WIDTH, height), dpi=plots.DPI, facecolor="white")
    body = FOOT / height, ROW * len(judged) / height
    words = figure.add_axes((0.015, body[0], STRIP - 0.03, body[1]))
    strip = figure.add_axes((STRIP, body[0], 0.985 - STRIP, body[1]), sharey=words)
    words.set_ylim(len(judged) - 0.5, -0.5)
    words.set_axis_off()
    _heading(words, judged)
    for row, each in enumerate(judged):
        _words(words, row, each)
        _point(strip, row, each)
    strip.annotate("measured, against claimed", (0, 1), (0, 8), **ABOVE, **SMALL)
    _scale(strip)
    return figure


def _heading(axes: "Axes", judged: Sequence[Judged]) -> None:
    """The title, and what stands in each column."""
    counts = Counter(each.verdict for each in judged)
    said = ", ".join(f"{name} {counts[name]}" for name in COLOURS if counts[name])
    bold = {"fontsize": 13, "fontweight": "bold", "color": plots.INK}
    axes.annotate(TITLE, (0, 1), (0, 52), **ABOVE, **bold)
    axes.annotate(f"{len(judged)} claims: {said}", (0, 1), (0, 34), **ABOVE, **SMALL)
    for name, at in COLUMNS.items():
        axes.annotate(name, (at, 1), (0, 8), **ABOVE, **SMALL)


def _words(axes: "Axes", row: int, judged: Judged) -> None:
    """One claim, its verdict, both numbers, and what they count."""
    colour = COLOURS[judged.verdict]
    _text(axes, "claim", row, judged.entry.id, fontweight="bold")
    _text(axes, "", row, judged.entry.title)
    _text(axes, "verdict", row, judged.verdict, fontweight="bold", color=colour)
    axes.axhline(row + 0.5, color=plots.GRID, linewidth=0.5)
    if not judged.found:
        return
    unit = judged.found["unit"]
    for name, key in (("claimed", "expected"), ("measured", "measured")):
        lines = textwrap.wrap(wording.value(judged.found[key]), WIDE[name])
        above = 0.17 if unit else 0.0
        _text(axes, name, row - above, _first(lines, 1 if unit else 2), fontsize=7.5)
    small = {"fontsize": 6.5, "color": plots.MUTED}
    _text(axes, "claimed", row + 0.2, _first(textwrap.wrap(unit, UNIT), 1), **small)


def _text(axes: "Axes", column: str, row: float, text: str, **style: Any) -> None:
    """A cell."""
    usual = {"fontsize": 8, "va": "center", "color": plots.INK}
    axes.text(COLUMNS[column], row, text, **(usual | style))


def _first(lines: list[str], count: int) -> str:
    """So many lines, and a sign if there are more."""
    return "\n".join(lines[:count]) + " ..." * (len(lines) > count)


def _point(axes: "Axes", row: int, judged: Judged) -> None:
    """How far off the number is, or from where to where."""
    axes.axhline(row + 0.5, color=plots.GRID, linewidth=0.5)
    if not judged.found:
        return
    claimed, found = (interval(judged.found[key]) for key in ("expected", "measured"))
    if not claimed or not found:
        return
    ends = [apart(claimed, each) for each in found]
    style = {"color": COLOURS[judged.verdict], "clip_on": False}
    axes.plot(ends, (row, row), linewidth=3, solid_capstyle="round", **style)
    axes.plot(ends, (row, row), MARKERS[judged.verdict], markersize=6, **style)


def _scale(axes: "Axes") -> None:
    """What the positions say."""
    axes.axvline(0, color=plots.MUTED, linewidth=0.8, zorder=0)
    axes.set_xlim(-1.08, 1.08)
    axes.set_xticks(
        (-1, -0.5, 0, 0.5, 1),
        ("none of\nit", "half", "as\nclaimed", "twice", "far\nmore"),
    )
    axes.tick_params(labelsize=7, colors=plots.MUTED, length=0, labelleft=False)
    axes.grid(axis="x", color=plots.GRID, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
