"""Running benchmarks: what is chosen, measured, kept and answered."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

import jaxdp
from benchmarks import __main__ as command
from benchmarks import catalogue, checking, compiling, exchanges, pairs, steps
from benchmarks.case import Case
from benchmarks.history import History
from jaxdp import algorithms
from tests.benchmarks_helpers import row

CASES = catalogue.every()


def of_values(name, *values, **more):
    """A case that measures these values, run by run, and fails at what is an error."""
    left = iter(values)

    def run(name, seconds):
        value = next(left)
        if isinstance(value, BaseException):
            raise value
        yield row(name, value, **more)

    return Case(name=name, group="made up", run=run)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs made-up cases by the command line; returns the status and the last run."""

    def run(cases, *arguments):
        monkeypatch.setattr(command.catalogue, "every", lambda: tuple(cases))
        code = {"commit": f"{next(commits):040x}", "committed": None, "dirty": False}
        code["committed"] = f"2026-01-01T00:00:{int(code['commit'], 16):02}+00:00"
        monkeypatch.setattr(command.running.machine, "code", lambda: code)
        status = command.main([*arguments, "--output", str(tmp_path)])
        runs = History(tmp_path / "history.json").runs()
        return status, runs[-1] if runs else None

    commits = itertools.count(1)
    return run


def names_and_values(run):
    return [(each["name"], each["value"]) for each in run["rows"]]


def test_names_are_unique_and_sorted_into_known_groups():
    names = [case.name for case in CASES]
    assert len({*names}) == len(names)
    assert {case.group for case in CASES} <= {*command.page.GROUPS}
    anchors = {command.page.slug(name) for name in names}
    assert len(anchors) == len(names)


def test_long_ones_are_left_out_unless_asked_for():
    plain = catalogue.chosen(CASES)
    assert plain and not any(case.long for case in plain)
    assert catalogue.chosen(CASES, every=True) == [*CASES]
    assert any(case.long for case in catalogue.chosen(CASES, "compile"))


@pytest.mark.parametrize(
    "pattern", ["PSUM, n = 4", "algorithms: ring*= 4", "m, N = 4,"]
)
def test_a_part_of_a_name_chooses(pattern):
    names = [case.name for case in catalogue.chosen(CASES, pattern)]
    assert names == ["ring / psum, N = 4, 16 MB"]


def test_an_unknown_name_lists_the_others(bench, capsys):
    status, run = bench([of_values("ring", 1.0)], "--only", "rign")
    said = capsys.readouterr().err
    assert (status, run) == (2, None)
    assert "--only got 'rign'" in said and "made up: ring" in said


def test_a_list_runs_nothing(bench, capsys):
    long = dataclasses.replace(of_values("b"), long=True)
    assert bench([of_values("a"), long], "--list") == (0, None)
    assert capsys.readouterr().out == "made up: a\nmade up: b (long: --all)\n"


def test_rows_are_kept_and_written(bench, tmp_path):
    status, run = bench([of_values("a", 1.5), of_values("b", 2.5)])
    assert status == 0 and run["complete"]
    assert names_and_values(run) == [("a", 1.5), ("b", 2.5)]
    assert {each["group"] for each in run["rows"]} == {"made up"}
    assert json.loads((tmp_path / "result.json").read_text()) == run
    assert "2 measured" in (tmp_path / "index.html").read_text()


def test_an_interrupted_run_keeps_what_it_measured(bench, tmp_path, capsys):
    cases = [
        of_values("a", 1.5),
        of_values("b", KeyboardInterrupt()),
        of_values("c", 1),
    ]
    status, run = bench(cases)
    assert status == 130
    assert names_and_values(run) == [("a", 1.5)] and not run["complete"]
    assert "interrupted" in (tmp_path / "index.html").read_text()
    assert "are kept" in capsys.readouterr().out


def test_a_run_that_is_interrupted_at_once_keeps_the_page_of_the_last(bench, tmp_path):
    bench([of_values("a", 1.5)])
    before = (tmp_path / "result.json").read_text()
    status, run = bench([of_values("a", KeyboardInterrupt())])
    assert status == 130 and names_and_values(run) == [("a", 1.5)]
    assert (tmp_path / "result.json").read_text() == before


def test_a_case_that_fails_is_named_and_the_others_go_on(bench, capsys):
    status, run = bench(
        [of_values("a", ValueError("as asked\nand more")), of_values("b", 1.0)]
    )
    assert status == 1 and names_and_values(run) == [("b", 1.0)]
    assert run["failed"] == [{"name": "a", "error": "ValueError: as asked"}]
    assert "failed: a: ValueError: as asked\n" in capsys.readouterr().out


def test_what_is_not_installed_is_named_and_left_out(bench, capsys):
    lacking = dataclasses.replace(of_values("a"), missing=lambda: "install it")
    status, run = bench([lacking, of_values("b", 1.0)])
    assert status == 0 and names_and_values(run) == [("b", 1.0)]
    assert "[1/2] a: not here: install it" in capsys.readouterr().out


def test_a_slowdown_fails_the_check(bench, capsys):
    for _ in range(5):
        assert bench([of_values("a", 1.0)], "--check")[0] == 0
    slow = of_values("a", 1.3, 1.25)  # measured twice
    status, run = bench([slow], "--check")
    assert status == 1 and names_and_values(run) == [("a", 1.25)]
    assert "slower: a: 1.250, usually 1.000" in capsys.readouterr().out
    assert bench([of_values("a", 1.3, 1.3)])[0] == 0  # a warning without --check


def test_what_is_slow_by_chance_is_measured_again(bench):
    for _ in range(5):
        bench([of_values("a", 1.0)])
    status, run = bench([of_values("a", 1.3, 1.01)], "--check")
    assert status == 0 and names_and_values(run) == [("a", 1.01)]


def test_a_passed_limit_fails_the_check(bench, capsys):
    status, run = bench([of_values("a", 1.4, 1.3, limit=1.2)], "--check")
    assert status == 1 and names_and_values(run) == [("a", 1.3)]
    assert "over its limit: a: 1.300, limit 1.2" in capsys.readouterr().out


def test_a_long_case_is_measured_once(bench):
    long = dataclasses.replace(of_values("a", 1.3, limit=1.2), long=True)
    status, run = bench([long], "--all", "--check")
    assert status == 1 and names_and_values(run) == [("a", 1.3)]
    assert run["failed"] == []


def test_ratios_of_neighbours_by_a_made_up_clock(monkeypatch):
    """Ours takes 3 and 6 s in turns, theirs 2 and 3: ratios 1.5 and 2."""
    clock, order = [0.0], []
    monkeypatch.setattr(pairs.time, "perf_counter", lambda: clock[0])

    def taking(name, *seconds):
        each = itertools.cycle(seconds)

        def run():
            order.append(name)
            clock[0] += next(each)

        return run

    ours, theirs = taking("ours", 3, 6), taking("theirs", 2, 3)
    found = pairs.compare("x", ours, theirs, seconds=0, limit=1.8)
    assert order[:4] == ["ours", "theirs", "theirs", "ours"]
    assert len(order) == 2 * (3 + 20)
    assert found.repeats == 20 and found.holds
    assert (found.value, found.quartiles) == (1.75, (1.5, 2.0))
    assert (found.ours_ms, found.theirs_ms) == (4500, 2500)


def test_schedules_are_checked_anew_every_time(monkeypatch):
    verified = []
    monkeypatch.setattr(checking, "verify", lambda schedule: verified.append(schedule))
    monkeypatch.setattr(checking, "DEVICES", 4)
    (found,) = checking.checked(algorithms.ring, "x", 0.0)
    assert (found.unit, found.limit, found.repeats) == ("s", 1.0, 15)
    assert len({*verified}) == 15 and verified[0].devices == 4


@pytest.mark.parametrize("unroll", [True, False])
def test_what_is_compiled_has_forty_rings(unroll):
    step, params, batch = compiling.training(2, unroll)
    assert len(step.__self__.buckets(params, batch)) == 40


def test_an_exchange_is_checked_and_timed():
    versus = exchanges.Versus(exchanges.ring, jaxdp.all_reduce, 2, 64, limit=9.0)
    (found,) = versus("x", 0.0)
    assert (found.unit, found.limit, found.repeats) == ("ratio", 9.0, 20)
    wrong = exchanges.Versus(exchanges.ring, lambda x, axis_name: x, 2, 64)
    with pytest.raises(AssertionError, match="wrong sum"):
        list(wrong("wrong sum", 0.0))


def test_steps_are_compared_from_the_same_start(monkeypatch):
    seen = []

    def compare(name, programs, starts, *, seconds, limit):
        seen.extend(programs[i](starts[i])[1] for i in (0, 1))
        return row(name, limit=limit)

    monkeypatch.setattr(steps, "compare_steps", compare)
    designs = jaxdp.RingAllReduce(), jaxdp.NativeAllReduce()
    found = [
        *steps.designs_pair(designs, 2, 1.5, "designs", 0.0),
        *steps.step_pair("ring", jaxdp.RingAllReduce(), 2, 1.05, "by hand", 0.0),
        *steps.port_pair(2, 1.05, "port", 0.0),
    ]
    assert [each.limit for each in found] == [1.5, 1.05, 1.05]
    for (ours, loss), (theirs, other) in zip(seen[::2], seen[1::2], strict=True):
        np.testing.assert_allclose(loss, other, rtol=1e-6)
        for one, another in zip(ours, theirs, strict=True):  # Adam: signs, mostly
            assert np.median(np.abs(one - another)) < 1e-6
