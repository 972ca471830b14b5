"""Figures show what `holdings` says: cell by cell, arrow by arrow."""

import dataclasses
import functools
import itertools
import subprocess
import sys

import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch

from jaxdp import algorithms
from jaxdp.draw import cells as strokes
from jaxdp.draw import chunks, draw_schedule, panels
from jaxdp.draw.cells import COMPLETE, NOTHING, colour
from jaxdp.schedule import holdings

SCHEDULES = [
    algorithms.ring(1),
    algorithms.ring(2),
    algorithms.ring(3),
    algorithms.ring(4),
    algorithms.ring(8),
    algorithms.ring_all_gather(4),
    algorithms.star(4),
    algorithms.star(8, root=3),
    algorithms.star_gather(5, root=2),
    algorithms.star_scatter(3, root=1),
    algorithms.bidirectional_ring(4),
    algorithms.pipelined_star(4, root=1, chunks=2),
    algorithms.tree(8),
    algorithms.pipelined_tree(4, chunks=2),
    algorithms.double_binary_tree(4, chunks=4),
    algorithms.recursive_doubling(3),
    algorithms.halving_doubling(6),
    algorithms.direct(4),
    algorithms.hierarchical(6, hosts=2),
]
figure_of = functools.cache(draw_schedule)  # for tests that only look
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)


def _cells(figure):
    """Cells by (panel, device, chunk)."""
    found = {}
    for patch in figure.axes[0].patches:
        gid = patch.get_gid()
        if gid and gid != "legend":
            panel, device, chunk = gid.split(", ")
            place = panel, int(device.split()[1]), int(chunk.split()[1])
            assert place not in found, f"{gid} is drawn twice"
            found[place] = patch
    return found


def _moment(panel):
    """Which of the states of `holdings` a panel shows."""
    if panel == "Start and end":
        return 0
    words = panel.split()
    return int(words[-1]) + (words[0] == "After")


@every_schedule
def test_cells_have_the_colours_of_holdings(schedule):
    cells = _cells(figure_of(schedule))
    moments = list(holdings(schedule))
    shown = set()
    for (panel, device, chunk), patch in cells.items():
        moment = _moment(panel)
        shown.add(moment)
        held = moments[moment][device][chunk]
        drawn = pytest.approx(to_rgb(patch.get_facecolor()), abs=1e-6)
        assert drawn == colour(len(held) / len(schedule.starts[chunk]))
    assert shown == set(range(len(moments)))
    places = schedule.devices * schedule.chunks
    assert len(cells) % places == 0


def test_more_contributions_are_a_deeper_blue_and_all_are_red():
    blues = [colour(k / 8) for k in range(1, 8)]
    assert colour(0) == NOTHING
    assert colour(1) == COMPLETE
    assert blues == sorted(blues, reverse=True)
    assert all(blue > red for red, _, blue in blues)
    assert COMPLETE[0] > 4 * COMPLETE[2]


@every_schedule
def test_every_send_is_an_arrow(schedule):
    laid_out = [panel for line in panels.lines(schedule) for panel in line.panels]
    sending = [panel for panel in laid_out if panel.arrows]
    assert [panel.title for panel in sending] == [
        f"Round {i}" for i in range(len(schedule.rounds))
    ]
    for panel, round_ in zip(sending, schedule.rounds, strict=True):
        sent = {triple for transfer in round_.transfers for triple in transfer}
        assert {(a.source, a.target, a.chunk) for a in panel.arrows} == sent
    arrows = [arrow for panel in laid_out for arrow in panel.arrows]
    patches = [
        patch
        for patch in figure_of(schedule).axes[0].patches
        if isinstance(patch, FancyArrowPatch)
    ]
    in_legend = 1 if arrows else 0
    assert len(patches) == len(arrows) + sum(a.wraps for a in arrows) + in_legend


def test_only_a_ring_closes():
    def wrapping(schedule):
        return {
            (arrow.source, arrow.target)
            for line in panels.lines(schedule)
            for panel in line.panels
            for arrow in panel.arrows
            if arrow.wraps
        }

    assert wrapping(algorithms.ring(4)) == {(3, 0)}
    assert wrapping(algorithms.ring(2)) == set()  # two devices are neighbours anyway
    assert wrapping(algorithms.star(3)) == set()


def test_lines_say_what_their_phase_leads_to():
    assert [line.title for line in panels.lines(algorithms.ring(4))] == [
        "Send and add, until every device holds 1 of 4 chunks complete",
        "Send and replace, until every device holds 4 of 4 chunks complete",
    ]
    assert [line.title for line in panels.lines(algorithms.star(4))] == [
        "Send and add, until device 0 holds 1 of 1 chunks complete",
        "Send and replace, until every device holds 1 of 1 chunks complete",
    ]


def test_a_line_lists_who_holds_chunks():
    adding, _ = panels.lines(algorithms.halving_doubling(6))
    until = "until devices 0, 2, 4 and 5 hold 1 of 4 chunks complete"
    assert adding.title == f"Send and add, {until}"


def test_lines_of_a_pipeline_add_and_replace():
    assert [line.title for line in panels.lines(algorithms.pipelined_star(4))] == [
        "Send and add, until device 0 holds 1 of 4 chunks complete",
        "Send, and add or replace, "
        "until every device holds 3 or 4 of 4 chunks complete",
        "Send and replace, until every device holds 4 of 4 chunks complete",
    ]
    _, mixed, _ = panels.lines(algorithms.pipelined_tree(8))
    assert mixed.title.endswith("until every device holds 5 to 8 of 8 chunks complete")


@pytest.mark.parametrize(
    ("columns", "lengths"), [(9, [8]), (7, [4, 4]), (3, [3, 3, 2]), (0, [1] * 8)]
)
def test_long_lines_break_into_equal_parts(columns, lengths):
    (line,) = panels.lines(algorithms.ring_reduce_scatter(8))
    parts = panels.broken((line,), columns)
    assert [len(part.panels) for part in parts] == lengths
    assert [part.title for part in parts] == [line.title] + [""] * (len(parts) - 1)
    assert [p for part in parts for p in part.panels] == [*line.panels]


@pytest.mark.parametrize("schedule", SCHEDULES[-8:], ids=lambda s: s.name)
def test_only_rows_with_arcs_have_room_for_them(schedule):
    """A cell's distance to the next one below tells how far arcs reach there."""
    cells = _cells(figure_of(schedule))
    plain = pytest.approx(strokes.CELL + strokes.ROW_GAP)
    for line in chunks._Drawing(schedule).lines:
        arrows = [arrow for panel in line.panels for arrow in panel.arrows]
        for chunk in range(1, schedule.chunks):
            above, below = (
                cells[line.panels[0].title, 0, c].get_y() for c in (chunk - 1, chunk)
            )
            reaches = [panels.reach(a) for a in arrows if a.chunk == chunk]
            longest = max(reaches, default=0)
            arcs = chunks.ARC * (longest + 1) if longest > 1 else 0.0
            assert abs(above - below) - arcs == plain


def test_arcs_to_one_device_land_side_by_side_and_do_not_cross():
    """Device 3 of 8: arcs from 0, 1 come from the left; 5, 6 and 7 from the right."""
    (round_,) = algorithms.star_reduce(8, root=3).rounds
    arrows = tuple(panels.Arrow(s, t, c) for x in round_.transfers for s, t, c in x)
    found = strokes.landings(arrows)
    ordered = sorted(found, key=found.__getitem__)
    assert [arrow.source for arrow in ordered] == [1, 0, 7, 6, 5]
    places = [found[arrow] for arrow in ordered]
    assert all(b - a > 0.05 for a, b in itertools.pairwise(places))
    assert max(map(abs, places)) < strokes.CELL / 2


def test_few_contributions_are_written_and_many_are_counted():
    def texts(devices):
        figure = draw_schedule(algorithms.ring_reduce_scatter(devices))
        return {text.get_text() for text in figure.axes[0].texts}

    assert {"0", "1", "2", "3", "dev 3", "chunk 3"} <= texts(4)
    assert "8" in texts(8)  # eight contributions: no device has that number
    assert "4" not in texts(4)


@pytest.mark.parametrize("name", ["ring.png", "ring.svg", "ring.pdf"])
def test_saves_in_the_format_of_the_suffix(tmp_path, name):
    path = tmp_path / name
    draw_schedule(algorithms.ring(4), path, title="Four in a ring")
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(starts[path.suffix])


def test_title_is_the_name_unless_given():
    def title(**given):
        return draw_schedule(algorithms.star(2), **given).axes[0].texts[0].get_text()

    assert title() == "star(2, root=0)"
    assert title(title="A star") == "A star"


def test_malformed_schedule_is_refused():
    ring = algorithms.ring(4)
    broken = dataclasses.replace(ring, rounds=ring.rounds[:1] * 2)
    with pytest.raises(ValueError, match=r"round 1.*twice"):
        draw_schedule(broken)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError) as error:
        draw_schedule(algorithms.ring(2))
    message = str(error.value)
    assert message.startswith("draw_schedule found no matplotlib")
    assert "pip install 'jax-data-parallel[experiments]'" in message


def test_importing_the_drawer_needs_no_matplotlib():
    code = "import sys, jaxdp.draw; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
