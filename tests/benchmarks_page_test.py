"""The page of benchmarks: what it shows, and where it draws it."""

import re

import pytest

from benchmarks import changes, lines, page, terminal
from tests.benchmarks_helpers import row, run


def history(last, **more):
    """Six commits with a value of 1, and one more."""
    runs = [run(hour, [row(value=1.0, spread=0.1, **more)]) for hour in range(6)]
    return [*runs, run(6, [row(value=last, spread=0.1, **more)])]


def drawn(runs):
    (card,) = page.cards(runs, runs[-1])
    return card.chart


def counts(text):
    return re.findall(r"<span class=\"\S+\">(\d+ [a-z ]+)</span>", text)


@pytest.mark.parametrize(
    ("last", "limit", "expected"),
    [
        (1.0, 1.5, ["0 slower", "0 over the limit", "0 faster", "1 measured"]),
        (1.4, 1.5, ["1 slower", "0 over the limit", "0 faster", "1 measured"]),
        (1.6, 1.5, ["1 slower", "1 over the limit", "0 faster", "1 measured"]),
        (1.0, 0.9, ["0 slower", "1 over the limit", "0 faster", "1 measured"]),
        (0.5, None, ["0 slower", "0 over the limit", "1 faster", "1 measured"]),
    ],
)
def test_the_summary_counts_what_matters(last, limit, expected):
    runs = history(last, limit=limit)
    text = page.render(runs, runs[-1])
    assert counts(text) == expected
    assert ('class="judged slower"' in text) == ("1 slower" in expected)


def test_the_page_needs_no_network_and_escapes_what_it_shows():
    runs = history(1.0, name="<b>a & b</b>", group="by hand")
    runs[-1]["failed"] = [{"name": "x", "error": "ValueError('<i>')"}]
    text = page.render(runs, runs[-1])
    assert not re.search(r"https?:|src=|@import|<script|<b>|<i>", text)
    assert text.count("&lt;b&gt;a &amp; b&lt;/b&gt;") >= 3
    assert "ValueError(&#39;&lt;i&gt;&#39;)" in text
    assert "prefers-color-scheme: dark" in text


def test_places_by_hand():
    """Values 1 and 1.5, quartiles from 0.9 to 1.6: 96 units of height for 0.7."""
    runs = [run(0, [row(value=1.0, spread=0.1)]), run(1, [row(value=1.5, spread=0.1)])]
    chart = drawn(runs)
    assert (lines.WIDTH, lines.HEIGHT) == (360, 132)
    assert [(p.x, round(p.y, 2)) for p in chart.points] == [
        (46, round(108 - 0.1 / 0.7 * 96, 2)),
        (348, round(108 - 0.6 / 0.7 * 96, 2)),
    ]
    assert chart.line == "46.0,94.3 348.0,25.7"
    assert chart.band == "46.0,80.6 348.0,12.0 348.0,39.4 46.0,108.0"
    assert chart.ticks == [(108, "0.900"), (12, "1.600")]
    assert chart.usual == pytest.approx(94.2857, abs=1e-3)
    assert chart.ends == ("0000000", "0000000")


def test_a_single_value_has_a_place():
    runs = [run(0, [row(value=0.0, spread=0.0)])]
    chart = drawn(runs)
    assert chart.line == "197.0,108.0"
    assert chart.ticks == [(108, "0.000")]
    assert (chart.usual, chart.limit, chart.ends[1]) == (None, None, "")
    assert counts(page.render(runs, runs[-1]))[-1] == "1 measured"


@pytest.mark.parametrize(("limit", "near"), [(2.2, True), (2.21, False)])
def test_a_limit_far_above_is_not_drawn(limit, near):
    """The highest quartile is 1.1."""
    runs = history(1.0, limit=limit)
    assert (drawn(runs).limit is not None) == near
    assert ('class="limit"' in page.render(runs, runs[-1])) == near


def test_points_say_what_they_are():
    runs = [run(0, [row()]), run(1, [row()], dirty=True), run(2, [row(value=2.0)])]
    assert [point.kind for point in drawn(runs).points] == [
        "plain",
        "changed",
        "judged slower",
    ]
    assert drawn(runs).points[1].title == (
        "0000000+, 2026-01-01: 1.000 (0.980 to 1.020)"
    )


def test_only_the_last_states_are_shown():
    runs = [run(hour, [row(value=1 + hour)]) for hour in range(50)]
    (card,) = page.cards(runs, runs[-1])
    assert [s.row.value for s in card.states] == [*range(11, 51)]
    (card,) = page.cards([*runs, run(3, [row(value=4)], ran=90)], runs[-1])
    assert card.states[0].row.value == 4  # the commit that was measured last


def test_a_benchmark_that_a_run_left_out_is_shown_from_an_earlier_one():
    runs = [run(0, [row("a"), row("b")]), run(1, [row("b", 3.0)])]
    found = page.cards(runs, runs[-1])
    assert [(c.change.row.name, c.change.row.value) for c in found] == [
        ("b", 3.0),
        ("a", 1.0),
    ]
    later = [run(hour, [row("b")]) for hour in range(2, 21)]
    names = [c.change.row.name for c in page.cards([*runs, *later], later[-1])]
    assert names == ["b"]


def test_other_machines_are_named_and_not_shown():
    runs = [*history(1.0), run(9, [row("elsewhere")]) | {"cores": 64}]
    text = page.render(runs, runs[-2])
    assert "7 on this machine; 1 of other machines" in text
    assert "elsewhere" not in text


def test_groups_have_titles_and_an_order():
    runs = [run(0, [row("a", group="compiling"), row("b", group="by hand")])]
    titles = list(page.grouped(page.cards(runs, runs[-1])))
    assert titles == [page.GROUPS["by hand"], page.GROUPS["compiling"]]
    others = [run(0, [row("a", group="a new one")])]
    assert list(page.grouped(page.cards(others, others[-1]))) == ["a new one"]


def test_the_terminal_says_what_became_slower_and_what_passes_its_limit(capsys):
    runs = history(1.4, limit=1.3, ours_ms=14.0, theirs_ms=10.0)
    runs[-1]["failed"] = [{"name": "x", "error": "ValueError('y')"}]
    judged = changes.of_run(runs, runs[-1])
    terminal.show(judged, runs[-1])
    shown = capsys.readouterr().out
    assert "14.0, 10.0" in shown and "+40.0 % slower" in shown
    assert terminal.warnings(judged, runs[-1]) == [
        "slower: ring: 1.400, usually 1.000, by chance up to 1.093, over 6 commits",
        "over its limit: ring: 1.400, limit 1.3",
        "failed: x: ValueError('y')",
    ]
    assert all(line in shown for line in terminal.warnings(judged, runs[-1]))
