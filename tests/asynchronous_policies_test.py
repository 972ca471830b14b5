"""Policies against tables worked out by hand."""

import math

import pytest

from jaxdp.asynchronous import Backup, Bounded, Eventual, Sequential

# Worker 1 is the slowest, worker 2 the fastest; two rounds have ended.
CLOCKS, ROUNDS = [3, 2, 5], 2


@pytest.mark.parametrize(
    ("policy", "iteration", "missing"),
    [
        pytest.param(Eventual(), 5, [], id="eventual-never-waits"),
        pytest.param(Bounded(0), 2, [], id="0-the-slowest"),
        pytest.param(Bounded(0), 3, [1], id="0-one-ahead"),
        pytest.param(Bounded(0), 5, [0, 1], id="0-far-ahead"),
        pytest.param(Bounded(1), 3, [], id="1-at-the-bound"),
        pytest.param(Bounded(1), 5, [0, 1], id="1-beyond"),
        pytest.param(Bounded(2), 5, [1], id="2-beyond"),
        pytest.param(Bounded(3), 5, [], id="3-at-the-bound"),
    ],
)
def test_who_waits_for_whom(policy, iteration, missing):
    assert policy.waits_for(iteration, CLOCKS, ROUNDS) == missing


@pytest.mark.parametrize("policy", [Sequential(), Backup(1)], ids=["all", "backup"])
def test_rounds_wait_for_those_who_have_not_pushed(policy):
    clocks = [3, 2, 3]  # round 2 is open, and lacks worker 1
    assert policy.waits_for(3, clocks, rounds=2) == [1]
    assert policy.waits_for(2, clocks, rounds=2) == []
    assert policy.waits_for(3, clocks, rounds=3) == []


@pytest.mark.parametrize(
    ("policy", "pushes"),
    [(Sequential(), 5), (Eventual(), 1), (Bounded(2), 1), (Backup(2), 3)],
    ids=str,
)
def test_pushes_that_make_an_update(policy, pushes):
    policy.check(5)
    assert policy.pushes_per_update(5) == pushes


def test_only_backup_drops_and_skips():
    backup = Backup(1)
    assert backup.is_late(3, rounds=4) and not backup.is_late(4, rounds=4)
    assert backup.next_iteration(2, rounds=4) == 4  # late: rounds 2 and 3 are over
    assert backup.next_iteration(5, rounds=4) == 5  # has pushed in round 4
    for policy in (Sequential(), Eventual(), Bounded(1)):
        assert not policy.is_late(3, rounds=4)
        assert policy.next_iteration(2, rounds=4) == 2


@pytest.mark.parametrize(
    ("kind", "number", "error", "message"),
    [
        (Bounded, -1, ValueError, r"max_staleness=-1.*at least 0"),
        (Bounded, math.inf, TypeError, r"max_staleness=inf.*Eventual\(\)"),
        (Bounded, True, TypeError, "max_staleness=True.*integer"),
        (Backup, -1, ValueError, "extra=-1.*at least 0"),
        (Backup, 0.5, TypeError, r"extra=0\.5.*integer"),
    ],
)
def test_bad_options_are_refused(kind, number, error, message):
    with pytest.raises(error, match=message):
        kind(number)


@pytest.mark.parametrize(
    ("policy", "workers", "error", "message"),
    [
        (Backup(3), 3, ValueError, r"extra=3 for 3 workers.* = 0.*extra <= 2"),
        (Backup(0), 0, ValueError, r"workers=0.*at least 1"),
        (Sequential(), 0, ValueError, r"workers=0.*at least 1"),
        (Eventual(), 1.0, TypeError, r"workers=1\.0.*integer"),
    ],
)
def test_workers_that_a_policy_cannot_serve_are_refused(
    policy, workers, error, message
):
    with pytest.raises(error, match=message):
        policy.check(workers)
