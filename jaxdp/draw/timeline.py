"""A chart of a predicted run: what a device computes and communicates when.

The lane in the middle shows communication that nothing hides: the device waits for it.
Hundreds of bars are not told apart, so of many the chart shows how much of the time
each kind takes, as the height of an area.
"""

import collections
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdp.draw.gantt import describe
from jaxdp.draw.plotting import INK, MUTED, empty_figure
from jaxdp.draw.units import time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxdp.program.timeline import Timeline

# Okabe and Ito's colours: what computes is blue or green, what communicates is not.
COLOURS = {
    "matrix product": "#0072B2",
    "convolution": "#009E73",
    "other kernel": "#56B4E9",
    "all-reduce": "#CC79A7",
    "reduce-scatter": "#E69F00",
    "all-gather": "#F0E442",
    "all-to-all": "#1f2933",
    "collective-permute": "#D55E00",
    "collective-broadcast": "#b87f00",
}
EXPOSED = {"facecolor": "#f4f5f7", "edgecolor": "#a9b2bc", "hatch": "//////"}
LANES = ("compute", "exposed", "communication")
HEIGHT = {"compute": 0.8, "exposed": 0.4, "communication": 0.8}  # of 1
WIDTH, TALL = 10.0, 3.1  # inches
MOST_BARS = 300  # that are drawn one by one
COLUMNS = 400  # of an area
SHARES = "; height: the share of the time"
Range = tuple[float, float]  # start and end, in seconds
Ranges = Mapping[tuple[str, str], Sequence[Range]]  # by lane and kind


def draw_timeline(
    timeline: "Timeline", path: str | os.PathLike | None = None, *, title: str = ""
) -> "Figure":
    """Draws the streams of the busiest device.

    Args:
        timeline: Of a compiled program.
        path: Where to save the figure; the suffix chooses the format.
        title: Title of the figure; empty names the hardware.

    Returns:
        The matplotlib figure. What is of one kind is a collection, with the kind as its
        `gid`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    title = title or f"One step on {timeline.hardware.name}, predicted"
    return draw_timelines({title: timeline}, path)


def draw_timelines(
    timelines: "Mapping[str, Timeline]", path: str | os.PathLike | None = None
) -> "Figure":
    """Draws timelines below each other, on one axis of time, to compare them.

    Args:
        timelines: By title; at least one.
        path: As for `draw_timeline`.

    Returns:
        The matplotlib figure, with axes for each, in order.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = empty_figure(WIDTH, TALL * len(timelines), "draw_timeline")
    from matplotlib.patches import Patch  # after the check that there is matplotlib

    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    every = figure.subplots(len(timelines), sharex=True, squeeze=False).flat
    end_s = max(timeline.step_s for timeline in timelines.values()) or 1.0
    unit, scale = time_unit(end_s)
    kinds: dict[str, None] = {}
    for axes, (title, timeline) in zip(every, timelines.items(), strict=True):
        ranges = _ranges(timeline)
        many = len(timeline.bars) > MOST_BARS
        (_areas if many else _bars)(axes, ranges, scale, end_s)
        axes.axvline(scale * timeline.step_s, color=INK, linewidth=1.4).set_gid("step")
        kinds |= dict.fromkeys(kind for _, kind in ranges)
        last = axes is figure.axes[-1]
        handles = [Patch(label=k, **_style(k)) for k in _ordered(kinds)] if last else []
        describe(
            axes, LANES, handles, title, _note(timeline) + (SHARES if many else "")
        )
    figure.axes[-1].set_xlim(0, 1.01 * scale * end_s)
    figure.axes[-1].set_xlabel(f"time ({unit})", color=MUTED)
    if path is not None:
        figure.savefig(os.fspath(path))
    return figure


def _bars(axes: Any, ranges: Ranges, scale: float, end_s: float) -> None:
    """A bar for everything that is done."""
    del end_s
    for (lane, kind), bars in ranges.items():
        spans = [(scale * start, scale * (end - start)) for start, end in bars]
        place = LANES.index(lane) - HEIGHT[lane] / 2, HEIGHT[lane]
        axes.broken_barh(spans, place, **_style(kind)).set_gid(kind)


def _areas(axes: Any, ranges: Ranges, scale: float, end_s: float) -> None:
    """In each of many columns, the share of its time that each kind takes."""
    edges = np.linspace(0.0, end_s, COLUMNS + 1)
    floor = {
        lane: np.full(COLUMNS, place + HEIGHT[lane] / 2)
        for place, lane in enumerate(LANES)
    }
    for (lane, kind), bars in ranges.items():
        top = floor[lane] - HEIGHT[lane] * _shares(bars, edges)
        low, high = (np.append(line, line[-1]) for line in (floor[lane], top))
        style = _style(kind) | {"linewidth": 0.0, "step": "post", "gid": kind}
        axes.fill_between(scale * edges, low, high, **style)
        floor[lane] = top


def _shares(bars: Sequence[Range], edges: np.ndarray) -> np.ndarray:
    """Which share of the time between two edges is in one of the bars."""
    starts, ends = np.array(sorted(bars)).T
    busy = np.cumsum(ends - starts)
    times = np.stack([starts, ends], axis=1).ravel()
    until = np.stack([busy - (ends - starts), busy], axis=1).ravel()
    return np.diff(np.interp(edges, times, until)) / np.diff(edges)


def _style(kind: str) -> dict[str, Any]:
    if kind == "exposed":
        return EXPOSED | {"linewidth": 0.4}
    return {"facecolor": COLOURS[kind], "edgecolor": "white", "linewidth": 0.4}


def _note(timeline: "Timeline") -> str:
    figures = {
        "step": timeline.step_s,
        "compute": timeline.compute_s,
        "communication": timeline.communication_s,
        "exposed": timeline.exposed_s,
    }
    words = (f"{name} {1e3 * seconds:.3g} ms" for name, seconds in figures.items())
    return f"device {timeline.device}: {', '.join(words)}; the line: end of the step"


def _ranges(timeline: "Timeline") -> Ranges:
    """What to draw, in the order of the legend."""
    found = collections.defaultdict(list)
    for bar in timeline.bars:
        found[bar.stream, bar.kind].append((bar.start_s, bar.end_s))
    computing = sorted(r for (s, _), rs in found.items() if s == "compute" for r in rs)
    exposed = [*_between(computing, timeline.step_s)]
    if exposed:
        found["exposed", "exposed"] = exposed
    places = {kind: place for place, kind in enumerate(_ordered(k for _, k in found))}
    return {key: found[key] for key in sorted(found, key=lambda key: places[key[1]])}


def _ordered(kinds: Iterable[str]) -> list[str]:
    """Kinds in the order of the legend."""
    return sorted(kinds, key=[*COLOURS, "exposed"].index)


def _between(ranges: Iterable[Range], end_s: float) -> Iterator[Range]:
    """The gaps between ranges in order; what rounding leaves is none."""
    free_s, least_s = 0.0, 1e-9 * end_s
    for start, end in ranges:
        if start - free_s > least_s:
            yield free_s, start
        free_s = max(free_s, end)
    if end_s - free_s > least_s:
        yield free_s, end_s
