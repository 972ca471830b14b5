"""What every worker of a parameter server does over time, and what the server applies.

This is the chart by which Li et al. (OSDI 2014, figure 6) explain their consistency
models. Under a barrier all fast workers wait and all applies fall on one line; under a
bound they wait only when they are too far ahead; without one they never do.
"""

import collections
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.draw.gantt import describe
from jaxdp.draw.plotting import INK, MUTED, empty_figure
from jaxdp.draw.units import time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours; hatches tell idle time apart where there is no colour.
KINDS: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": "#56B4E9", "edgecolor": "#0072B2"},
    "push": {"facecolor": "#E69F00", "edgecolor": "#b87f00"},
    "pull": {"facecolor": "#009E73", "edgecolor": "#00704f"},
    "wait": {"facecolor": "#f4f5f7", "edgecolor": "#a9b2bc", "hatch": "//////"},
    "stopped": {"facecolor": "#7b8794", "edgecolor": "#1f2933", "hatch": "xxxx"},
}
MARKS = {"drop": ("dropped", "#D55E00"), "refuse": ("refused", "#CC79A7")}

WIDTH, SIDES = 10.0, 2.6  # inches: the figure, and what is beside its lanes
ALL_LANES, THICKEST, THINNEST = 5.6, 0.5, 0.17  # inches: height together, and of one
BAR, DIGIT, SIZE = 0.74, 0.075, 7.5  # share of a lane; inches; points
CROWD = 200  # more updates than this are shown without hairlines
NOTE = "in bars: iteration; on the server's ticks: version made; hairlines: whose push"


def draw_lanes(
    spans: Sequence[Any],
    events: Sequence[Any] = (),
    path: str | os.PathLike | None = None,
    *,
    title: str = "Workers and server over time",
    note: str = "",
    until_s: float | None = None,
) -> "Figure":
    """Draws a lane per worker and, above them, one of the server's updates.

    Beside each lane stands how many of the worker's pushes were applied and which part
    of the time it computed, both within what is shown.

    Args:
        spans: What workers do: records with `worker`, `kind` ("compute", "push",
            "pull", "wait" or "stopped"), `start_s`, `end_s` and `iteration`, such as
            the `spans` of a `jaxdp.asynchronous.Run`.
        events: What the server does: records with `time_s`, `kind` ("apply", "drop",
            "refuse"; others are not drawn), `worker` and `version`.
        path: Where to save the figure; the suffix chooses the format.
        title: Title of the figure.
        note: Small print below it; empty says what the numbers are.
        until_s: Where the time axis ends, in seconds; None shows everything.

    Returns:
        The matplotlib figure, readable with up to about 16 workers. Bars of one kind in
        one lane are a collection with a `gid` such as `"worker 2, compute"`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: A span has an unknown kind, or `until_s` is not positive.
    """
    _check(spans, until_s)
    ends = [span.end_s for span in spans] + [event.time_s for event in events]
    # A little room for the number of a last update.
    end_s = 1.02 * max(ends, default=0.0) if until_s is None else until_s
    spans = [span for span in spans if span.start_s < min(span.end_s, end_s)]
    events = [event for event in events if event.time_s <= end_s]
    workers = 1 + max((each.worker for each in (*spans, *events)), default=-1)
    lane = min(THICKEST, max(THINNEST, ALL_LANES / (workers + 1)))
    figure = empty_figure(WIDTH, lane * (workers + 1) + 1.75, "draw_lanes")
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    axes = figure.subplots()
    drawing = _Drawing(axes, end_s or 1.0)
    drawing.draw_workers(spans)
    drawing.draw_server(events)
    drawing.draw_sides(spans, events, workers)
    names = ["server", *(f"worker {worker}" for worker in range(workers))]
    describe(axes, names, _handles(spans, events), title, note or NOTE)
    if path is not None:
        figure.savefig(os.fspath(path))
    return figure


class _Drawing:
    """Axes whose unit of time fits what is shown."""

    def __init__(self, axes: Any, end_s: float):
        self.axes, self.end_s = axes, end_s
        unit, self.scale = time_unit(end_s)
        self.inches = (WIDTH - SIDES) / end_s  # per second
        axes.set_xlim(0, end_s * self.scale)
        axes.set_xlabel(f"time ({unit})", color=MUTED)

    def draw_workers(self, spans: Iterable[Any]) -> None:
        """A bar per span; numbers where they fit, unless that is almost nowhere."""
        bars, numbers, computed = collections.defaultdict(list), [], 0
        for span in spans:
            end_s = min(span.end_s, self.end_s)
            bars[span.worker, span.kind].append((span.start_s, end_s - span.start_s))
            if span.kind == "compute":
                computed += 1
                room = (end_s - span.start_s) * self.inches
                if room > DIGIT * (len(str(span.iteration)) + 1):
                    middle_s = (span.start_s + end_s) / 2
                    numbers.append((middle_s, span.worker + 1, span.iteration))
        for number in numbers if 4 * len(numbers) >= computed else ():
            self.write(*number)
        for (worker, kind), ranges in bars.items():
            bar = self.axes.broken_barh(
                [(self.scale * start, self.scale * width) for start, width in ranges],
                (worker + 1 - BAR / 2, BAR),
                linewidth=0.5,
                **KINDS[kind],
            )
            bar.set_gid(f"worker {worker}, {kind}")

    def draw_server(self, events: Iterable[Any]) -> None:
        """A tick per version, a hairline to whose push it holds, a cross per loss."""
        applied = [event for event in events if event.kind == "apply"]
        made = {event.version: event.time_s for event in applied}
        if len(made) <= CROWD:
            times = [self.scale * event.time_s for event in applied]
            lanes = [event.worker + 1 for event in applied]
            below = {"linewidth": 0.4, "zorder": 0.9}  # under the bars
            self.axes.vlines(times, BAR / 2, lanes, MUTED, **below)
        ticks = [self.scale * time_s for time_s in made.values()]
        points = 1.2 if len(made) <= CROWD else 0.4
        tick = self.axes.vlines(ticks, -0.05, BAR / 2, INK, linewidth=points)
        tick.set_gid("server, apply")
        for kind, (_, colour) in MARKS.items():
            lost = [self.scale * event.time_s for event in events if event.kind == kind]
            style = {"color": colour, "ms": 5, "mew": 1.6, "zorder": 4}
            self.axes.plot(lost, [0.1] * len(lost), "x", gid=f"server, {kind}", **style)
        free_s = 0.0
        for version, time_s in made.items():
            half_s = DIGIT * (len(str(version)) + 1) / 2 / self.inches
            if time_s - half_s >= free_s:
                self.write(time_s, -0.26, version)
                free_s = time_s + half_s

    def draw_sides(
        self, spans: Iterable[Any], events: Iterable[Any], workers: int
    ) -> None:
        """What each lane comes to."""
        busy_s = collections.Counter()
        for span in spans:
            if span.kind == "compute":
                busy_s[span.worker] += min(span.end_s, self.end_s) - span.start_s
        applied = collections.Counter(e.worker for e in events if e.kind == "apply")
        lost = collections.Counter(event.kind for event in events)
        versions = {event.version for event in events if event.kind == "apply"}
        words = [f"{lost[kind]} {MARKS[kind][0]}" for kind in MARKS if lost[kind]]
        texts = [", ".join([f"{len(versions)} updates", *words])]
        for worker in range(workers):
            share = busy_s[worker] / self.end_s
            texts.append(f"{applied[worker]} applied, {share:.0%} computing")
        style = {"transform": self.axes.get_yaxis_transform(), "color": MUTED}
        for y, text in enumerate(texts):
            self.axes.text(1.01, y, text, fontsize=SIZE, va="center", **style)

    def write(self, time_s: float, y: float, number: int) -> None:
        """A number in the middle of something."""
        x = time_s * self.scale
        style = {"ha": "center", "va": "center_baseline", "color": INK}
        self.axes.text(x, y, str(number), fontsize=SIZE, clip_on=True, **style)


def _handles(spans: Iterable[Any], events: Iterable[Any]) -> list[Any]:
    """What the legend explains: the kinds that are shown."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spans_shown, events_shown = (
        {each.kind for each in all_} for all_ in (spans, events)
    )
    handles: list[Any] = [
        Patch(**style, linewidth=0.5, label=kind)
        for kind, style in KINDS.items()
        if kind in spans_shown
    ]
    for kind, (word, colour) in ({"apply": ("update", INK)} | MARKS).items():
        if kind in events_shown:
            marker = "|" if kind == "apply" else "x"
            line = Line2D([], [], color=colour, marker=marker, ms=6, mew=1.4, ls="")
            line.set_label(word if kind == "apply" else f"{word} push")
            handles.append(line)
    return handles


def _check(spans: Iterable[Any], until_s: float | None) -> None:
    """Refuses what cannot be drawn."""
    for span in spans:
        if span.kind not in KINDS:
            raise ValueError(
                f"draw_lanes got a span of kind {span.kind!r}. It can draw "
                f"{', '.join(KINDS)}. Worker {span.worker} has it at "
                f"{span.start_s} s. Rename it or leave it out."
            )
    if until_s is not None and not until_s > 0:
        raise ValueError(
            f"draw_lanes got until_s={until_s}. The time axis starts at 0 and must end "
            "after it. Pass a positive number of seconds, or None for everything."
        )
