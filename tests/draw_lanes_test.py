"""The lanes show every span and event, where and when it was, and nothing else."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex

from jaxdp.asynchronous.log import Event, Span
from jaxdp.draw import draw_lanes
from jaxdp.draw.lanes import KINDS, NOTE

# Worker 2 does nothing; worker 3 stops inside iteration 10.
SPANS = [
    Span(0, "pull", 0.0, 0.5, 0, 0),
    Span(0, "compute", 0.5, 4.0, 0, 0),
    Span(0, "push", 4.0, 4.25, 0, 0),
    Span(0, "wait", 4.25, 7.0, 1, -1),
    Span(0, "compute", 7.0, 9.5, 1, 3),
    Span(1, "compute", 0.25, 0.375, 7, 0),  # too short for its number
    Span(1, "push", 0.375, 0.375, 7, 0),  # no length at all
    Span(3, "compute", 1.0, 3.0, 10, 1),
    Span(3, "stopped", 3.0, 5.5, 10, 1),
    Span(3, "compute", 5.5, 6.5, 10, 1),
]
EVENTS = [
    Event(0.0, "read", 0, 0, 0, 0),
    Event(1.5, "apply", 1, 7, 1, 0),
    Event(4.5, "apply", 0, 0, 2, 1),
    Event(4.5, "apply", 3, 9, 2, 0),
    Event(5.0, "drop", 1, 8, 2, 0),
    Event(6.0, "refuse", 3, 10, 2, 0),
    Event(8.0, "apply", 1, 9, 3, 0),
]


def axes_of(*arguments, **keywords) -> Any:
    figure = draw_lanes(*arguments, **keywords)
    figure.draw_without_rendering()
    return figure.axes[0]


def bars(axes):
    """Start and end of every bar, and its lowest and highest lane, by gid."""
    found = {}
    for collection in axes.collections:
        if isinstance(collection, PolyCollection):
            boxes = [path.get_extents() for path in collection.get_paths()]
            rows = [[box.x0, box.x1, box.y0, box.y1] for box in boxes]
            found[collection.get_gid()] = np.array(rows)
    return found


def ticks(axes):
    """Times of the server's ticks."""
    (found,) = [c for c in axes.collections if c.get_gid() == "server, apply"]
    return [float(segment[0, 0]) for segment in found.get_segments()]


def texts(axes):
    """What is written where: (x, y) of texts in axes units."""
    return {(t.get_text(), *map(float, t.get_position())) for t in axes.texts}


def test_every_span_is_a_bar_in_the_lane_of_its_worker():
    drawn = bars(axes_of(SPANS, EVENTS))
    expected = {}
    for span in SPANS:
        if span.end_s > span.start_s:
            gid = f"worker {span.worker}, {span.kind}"
            expected.setdefault(gid, []).append((span.start_s, span.end_s))
    assert drawn.keys() == expected.keys()
    for gid, ranges in expected.items():
        np.testing.assert_allclose(drawn[gid][:, :2], ranges)
        lane = int(gid.split(",")[0].split()[1]) + 1  # the server's is 0
        low, high = drawn[gid][:, 2], drawn[gid][:, 3]
        assert np.all((lane - 0.5 < low) & (low < lane))
        assert np.all((lane < high) & (high < lane + 0.5))


def test_every_worker_has_a_lane_below_the_server():
    axes = axes_of(SPANS, EVENTS)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["server", "worker 0", "worker 1", "worker 2", "worker 3"]
    assert list(axes.get_yticks()) == [0, 1, 2, 3, 4]
    top, bottom = axes.get_ylim()[::-1]
    assert top < 0 < 4 < bottom


def test_kinds_are_told_apart_with_and_without_colour():
    faces = {to_hex(style["facecolor"]) for style in KINDS.values()}
    assert len(faces) == len(KINDS) == 5
    assert [kind for kind in KINDS if "hatch" in KINDS[kind]] == ["wait", "stopped"]
    for collection in axes_of(SPANS).collections:
        if isinstance(collection, PolyCollection):
            kind = str(collection.get_gid()).split(", ")[1]
            (face,) = {
                to_hex(colour) for colour in np.asarray(collection.get_facecolor())
            }
            assert face == to_hex(KINDS[kind]["facecolor"])


def test_versions_are_ticks_and_hairlines_lead_to_whose_push():
    axes = axes_of(SPANS, EVENTS)
    assert ticks(axes) == [1.5, 4.5, 8.0]
    (hairlines,) = [
        c
        for c in axes.collections
        if isinstance(c, LineCollection) and c.get_gid() is None
    ]
    ends = [tuple(map(float, segment[1])) for segment in hairlines.get_segments()]
    assert ends == [(1.5, 2), (4.5, 1), (4.5, 4), (8.0, 2)]
    bar = next(c for c in axes.collections if c.get_gid() == "worker 0, compute")
    assert hairlines.get_zorder() < bar.get_zorder()


def test_lost_pushes_are_crosses_on_the_server():
    crosses = {
        line.get_gid(): list(np.asarray(line.get_xdata()))
        for line in axes_of(SPANS, EVENTS).lines
    }
    assert crosses == {"server, drop": [5.0], "server, refuse": [6.0]}


def test_numbers_are_written_where_they_fit():
    written = texts(axes_of(SPANS, EVENTS))
    bars = {("0", 2.25, 1.0), ("1", 8.25, 1.0), ("10", 2.0, 4.0), ("10", 6.0, 4.0)}
    assert bars <= written
    assert {(text, x) for text, x, y in written if y == -0.26} == {
        *(("1", 1.5), ("2", 4.5), ("3", 8.0))
    }
    assert "7" not in {text for text, *_ in written}


def test_numbers_on_ticks_do_not_overlap():
    crowd = [Event(i / 50, "apply", 0, i, 1000 + i, 0) for i in range(200)]
    axes = axes_of([], crowd)
    assert len(ticks(axes)) == 200
    boxes = sorted(
        (box.x0, box.x1)
        for text in axes.texts
        if text.get_text().startswith("1") and text.get_position()[1] == -0.26
        for box in [text.get_window_extent()]
    )
    assert 10 < len(boxes) < 100
    assert all(left[1] < right[0] for left, right in itertools.pairwise(boxes))


def test_the_last_number_is_not_cut():
    axes = axes_of([], [Event(5.0, "apply", 0, 0, 1234, 0)])
    (number,) = [text for text in axes.texts if text.get_text() == "1234"]
    assert number.get_window_extent().x1 < axes.get_window_extent().x1


def test_a_crowd_is_shown_without_hairlines_and_scattered_numbers():
    spans = [Span(0, "compute", i / 99, (i + 1) / 99, i, 0) for i in range(500)]
    spans.append(Span(0, "compute", 6.0, 7.0, 777, 0))
    events = [Event(i / 99, "apply", 0, i, i + 1, 0) for i in range(201)]
    axes = axes_of(spans, events)
    assert len(ticks(axes)) == 201
    assert all(isinstance(c.get_gid(), str) for c in axes.collections)
    assert len(bars(axes)["worker 0, compute"]) == 501
    assert not [text for text, _, y in texts(axes) if y == 1.0 and text.isdigit()]


def test_sides_say_what_was_applied_and_how_long_workers_computed():
    """Shares of 10 s: 3.5 + 2.5, 0.125, 0 and 2 + 1."""
    beside = [t for t, x, _ in texts(axes_of(SPANS, EVENTS, until_s=10.0)) if x == 1.01]
    assert sorted(beside) == [
        "0 applied, 0% computing",
        "1 applied, 30% computing",
        "1 applied, 60% computing",
        "2 applied, 1% computing",
        "3 updates, 1 dropped, 1 refused",
    ]


def test_until_cuts_spans_events_and_shares():
    """Shares of 4.5 s: 3.5, 0.125 and 2."""
    axes = axes_of(SPANS, EVENTS, until_s=4.5)
    drawn = bars(axes)
    assert axes.get_xlim() == (0, 4.5)
    assert drawn["worker 0, compute"][:, :2].tolist() == [[0.5, 4.0]]
    assert drawn["worker 0, wait"][:, :2].tolist() == [[4.25, 4.5]]
    assert drawn["worker 3, stopped"][:, :2].tolist() == [[3.0, 4.5]]
    assert ticks(axes) == [1.5, 4.5]
    beside = {text for text, x, _ in texts(axes) if x == 1.01}
    assert beside >= {"2 updates", "1 applied, 78% computing"}
    cut = texts(axes_of(SPANS, EVENTS, until_s=2.0))  # iteration 10 runs from 1 to 3 s
    assert "0 applied, 50% computing" in {text for text, x, _ in cut if x == 1.01}


@pytest.mark.parametrize(
    ("end_s", "unit", "shown"),
    [(250.0, "s", 250.0), (1.0, "s", 1.0), (0.02, "ms", 20.0), (3e-6, "µs", 3.0)],
)
def test_time_has_a_unit_that_fits(end_s, unit, shown):
    axes = axes_of([Span(0, "compute", 0.0, end_s, 4, 0)], until_s=end_s)
    assert axes.get_xlabel() == f"time ({unit})"
    assert axes.get_xlim()[1] == pytest.approx(shown)
    assert bars(axes)["worker 0, compute"][0, :2] == pytest.approx([0, shown])
    (middle,) = [x for text, x, y in texts(axes) if (text, y) == ("4", 1.0)]
    assert middle == pytest.approx(shown / 2)


def test_legend_explains_what_is_shown_and_no_more():
    def labels(*arguments):
        return [t.get_text() for t in axes_of(*arguments).get_legend().get_texts()]

    assert set(labels(SPANS, EVENTS)) == {
        *("compute", "push", "pull", "wait", "stopped"),
        *("update", "dropped push", "refused push"),
    }
    assert labels(SPANS[:2], EVENTS[:2]) == ["compute", "pull", "update"]
    assert axes_of([]).get_legend() is None


def test_title_and_note():
    axes = axes_of(SPANS, title="Sequential, 4 workers", note="time is virtual")
    assert axes.get_title(loc="left") == "Sequential, 4 workers"
    assert "time is virtual" in {text.get_text() for text in axes.texts}
    assert NOTE in {text.get_text() for text in axes_of(SPANS).texts}


@pytest.mark.parametrize("workers", [1, 2, 4, 16, 64])
def test_figures_grow_no_higher_than_a_page(workers):
    """Nothing overlaps: the legend is below the lanes, and the text in the bars."""
    spans = [Span(w, "compute", 0.0, 1.0 + w, w, 0) for w in range(workers)]
    figure = draw_lanes(spans, [Event(1.0, "apply", 0, 0, 1, 0)])
    figure.draw_without_rendering()
    axes: Any = figure.axes[0]
    assert figure.get_figheight() < 13
    legend, frame = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.y1 < axes.xaxis.label.get_window_extent().y0 < frame.y0
    assert 0 < legend.y0
    lane = frame.height / (workers + 1)
    for text in axes.texts:
        box = text.get_window_extent()
        assert 0 < box.x0 < box.x1 < figure.bbox.width
        if text.get_text().isdigit():
            assert box.height < lane


def test_nothing_is_shown_as_nothing():
    axes = axes_of([])
    assert bars(axes) == {}
    assert ticks(axes) == []
    assert [label.get_text() for label in axes.get_yticklabels()] == ["server"]


@pytest.mark.parametrize("name", ["run.png", "run.svg", "run.pdf"])
def test_saves_in_the_format_of_the_suffix(tmp_path, name):
    path = tmp_path / name
    draw_lanes(SPANS, EVENTS, path)
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(starts[path.suffix])


def test_unknown_kinds_are_refused():
    strange = Span(3, "compute", 1.5, 2.0, 0, 0)._replace(kind="sleep")  # type: ignore
    with pytest.raises(ValueError, match=r"kind 'sleep'\. It can .*Worker 3 .*1\.5 s"):
        draw_lanes([*SPANS, strange])


@pytest.mark.parametrize("until_s", [0, -1.0, float("nan")])
def test_time_must_not_end_before_it_begins(until_s):
    with pytest.raises(ValueError, match=rf"got until_s={until_s}\. .*positive"):
        draw_lanes(SPANS, until_s=until_s)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"^draw_lanes found no matplotlib"):
        draw_lanes(SPANS)
