"""What counts as slower: a real slowdown does, noise does not."""

import numpy as np
import pytest

from benchmarks import changes
from tests.benchmarks_helpers import MACHINE, row, run


def judged(values, last, before=None, **more):
    """The last of runs with these values, one commit each."""
    runs = [run(hour, [row(value=value, **more)]) for hour, value in enumerate(values)]
    runs += before or []
    runs.append(run(1000, [row(value=last, **more)]))
    (change,) = changes.of_run(runs, runs[-1])
    return change


def test_the_first_run_is_new():
    change = judged([], 3.0)
    assert (change.verdict, change.usual, change.relative) == ("new", None, None)


def test_usual_and_bound_by_hand():
    """1.00 is the median, 0.02 the median distance from it, 0.04 of neighbours."""
    values = [0.98, 1.02, 0.97, 1.03, 0.99, 1.01]
    change = judged(values, 1.2, spread=0.0)
    assert change.usual == pytest.approx(1.0)
    assert change.before == 6
    assert change.bound == pytest.approx(1 + 5 * 1.4826 * 0.02)
    assert change.relative == pytest.approx(0.2)


def test_the_chance_error_of_the_row_itself_is_added():
    """Quartiles 0.1349 apart: a deviation of 0.1, over 100 pairs 0.012533."""
    change = judged([1.0] * 6, 1.2, spread=0.1349 / 2)
    assert change.bound == pytest.approx(1 + 5 * 0.012533)


@pytest.mark.parametrize(
    ("last", "verdict"),
    [(1.051, "slower"), (1.049, "as before"), (0.953, "as before"), (0.951, "faster")],
)
def test_five_percent_is_the_least_that_counts(last, verdict):
    assert judged([1.0] * 6, last, spread=0.0).verdict == verdict


@pytest.mark.parametrize(
    ("last", "verdict"), [(12.6, "slower"), (12.4, "as before"), (7.9, "faster")]
)
def test_of_seconds_a_quarter(last, verdict):
    assert judged([10.0] * 6, last, unit="s", spread=0.0).verdict == verdict


def test_with_few_commits_the_spread_of_pairs_counts():
    """Quartiles 0.1349 apart: 3 deviations of 0.1, and a little of its own."""
    near, far = (judged([1.0] * 3, last, spread=0.1349 / 2) for last in (1.29, 1.31))
    assert near.bound == pytest.approx(1 + 3 * np.hypot(0.1, 0.012533))
    assert (near.verdict, far.verdict) == ("as before", "slower")


@pytest.mark.parametrize("commits", [1, 2, 3, 4, 6, 10])
def test_noise_is_seldom_slower_and_a_slowdown_mostly(commits):
    """Values scatter by 1.5 % from run to run; a slow one is 20 % slower."""
    rng = np.random.default_rng(commits)
    scattered = np.exp(0.015 * rng.standard_normal((300, commits + 1)))
    few = {"spread": 0.03, "repeats": 200}
    noise = [judged(values[:-1], values[-1], **few) for values in scattered]
    slow = [judged(values[:-1], 1.2 * values[-1], **few) for values in scattered]
    assert sum(change.verdict == "slower" for change in noise) <= 3
    assert sum(change.verdict == "slower" for change in slow) >= 290


def test_one_slow_run_before_does_not_hide_a_slowdown():
    assert judged([1.0, 1.5, 1.0, 1.0, 1.0], 1.2).verdict == "slower"


def test_a_slow_drift_is_seen():
    """2 % with every commit: neighbours are near, if all are far from the median."""
    values = [1.02**commit for commit in range(11)]
    change = judged(values[:-1], values[-1], spread=0.0)
    assert change.verdict == "slower"
    usual = (1.02**4 + 1.02**5) / 2
    apart = np.median(np.diff(values[:-1])) / 2**0.5
    assert change.usual == pytest.approx(usual)
    assert change.bound == pytest.approx(usual + 5 * 1.4826 * apart)


def test_only_the_last_ten_commits_count():
    change = judged([1.0] * 20 + [2.0] * 10, 2.0)
    assert (change.usual, change.before) == (2.0, 10)


def test_running_a_slow_commit_again_does_not_make_it_usual():
    runs = [run(hour, [row(value=1.0)]) for hour in range(5)]
    runs += [run(7, [row(value=1.3)], ran=hour) for hour in range(7, 30)]
    (change,) = changes.of_run(runs, runs[-1])
    assert (change.verdict, change.usual, change.state.runs) == ("slower", 1.0, 23)


def test_running_again_settles_a_doubt():
    """The median over the runs of a commit counts, not the one slow run."""
    runs = [run(hour, [row(value=1.0)]) for hour in range(5)]
    runs += [run(7, [row(value=v)], ran=8 + i) for i, v in enumerate((1.3, 1.0, 1.01))]
    (change,) = changes.of_run(runs, runs[-1])
    assert (change.verdict, change.row.value) == ("as before", 1.01)


def test_changed_files_are_compared_and_not_compared_with():
    runs = [run(hour, [row(value=1.0)]) for hour in range(5)]
    edits = [run(4, [row(value=1.3)], dirty=True, ran=h) for h in range(10, 14)]
    (change,) = changes.of_run([*runs, *edits], edits[-1])
    assert (change.verdict, change.usual, change.before) == ("slower", 1.0, 5)
    assert change.state.runs == 1 and change.state.label == "0000000+"
    clean = run(20, [row(value=1.0)])
    (change,) = changes.of_run([*runs, *edits, clean], clean)
    assert (change.verdict, change.before) == ("as before", 5)


def test_a_commit_that_was_measured_later_stays_before_its_followers():
    new = [run(hour, [row(value=1.0)]) for hour in range(10, 15)]
    old = run(5, [row(value=1.3)], ran=100)
    (change,) = changes.of_run([*new, old], old)
    assert change.verdict == "new"
    states = changes.states([*new, old], "ring")
    assert [state.committed[11:13] for state in states] == "05 10 11 12 13 14".split()


@pytest.mark.parametrize("fact", ["jax", "platform", "device_kind", "cores", "cpu"])
def test_other_machines_and_versions_are_not_compared(fact):
    other = 64 if fact == "cores" else "another"
    others = [run(h, [row(value=0.5)]) | {fact: other} for h in range(6, 12)]
    change = judged([1.0] * 5, 1.0, others)
    assert (change.verdict, change.before) == ("as before", 5)
    assert fact in MACHINE


def test_another_python_is_the_same_machine():
    python = {"python": "3.12.1"}
    others = [run(h, [row(value=0.5)]) | python for h in range(6, 12)]
    assert judged([1.0] * 5, 1.0, others).before == 10


def test_a_row_that_changed_its_unit_starts_anew():
    runs = [run(h, [row(value=1.0)]) for h in range(5)]
    runs.append(run(6, [row(value=40.0, unit="s")]))
    (change,) = changes.of_run(runs, runs[-1])
    assert change.verdict == "new"


def test_outside_of_git_every_run_is_a_state():
    runs = [
        run(h, [row(value=1.0)]) | {"commit": None, "committed": None} for h in range(6)
    ]
    (change,) = changes.of_run(runs, runs[-1])
    assert (change.before, change.state.label) == (5, "no git")
