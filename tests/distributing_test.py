"""The benchmark of what distributing costs: its arithmetic, and its processes."""

import os
import time

import pytest

from benchmarks import distributing
from experiments.harness.processes import Processes

WORKER = """
import sys, time
from experiments.harness import processes

def answer(do, value=0):
    print("a library prints this")
    if do == "fail":
        raise ArithmeticError("as asked")
    if do == "wait":
        time.sleep(60)
    return [int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], value]

processes.serve(answer)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda: Processes("a_worker", 2, tmp_path, "argument")


def has_ended(worker):
    return worker.poll() is not None


def test_workers_answer_by_rank_and_end(start):
    with start() as group:
        assert group.ask(do="tell", value=7) == [
            [0, 2, "argument", 7],
            [1, 2, "argument", 7],
        ]
        assert group.ask([1], do="tell") == [[1, 2, "argument", 0]]
    assert all(map(has_ended, group.workers))


def test_what_stands_before_the_command_of_each_rank(tmp_path, monkeypatch):
    (tmp_path / "a_worker.py").write_text(
        "import os, sys\nfrom experiments.harness import processes\n"
        "processes.serve(lambda: [sys.argv[1], os.environ['PLACE']])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prefixes = [["env", "PLACE=here"], ["env", "PLACE=there"]]
    with Processes("a_worker", 2, tmp_path, prefixes=prefixes) as group:
        assert group.ask() == [["0", "here"], ["1", "there"]]


def test_a_failing_worker_is_reported_and_ends_all(start):
    with (
        start() as group,
        pytest.raises(RuntimeError, match=r"worker 1 of 2[^$]*asked"),
    ):
        group.ask([1], do="fail")
    assert all(map(has_ended, group.workers))


def test_a_worker_that_waits_is_given_up(start):
    with start() as group:
        group.workers[0].stdin.write('{"do": "wait"}\n')
        group.workers[0].stdin.flush()
        with pytest.raises(RuntimeError, match="no answer within 0 s from worker 0"):
            group.collect([0], 0.3)
        assert all(map(has_ended, group.workers))


def test_workers_whose_parent_is_gone_end_while_they_wait(start):
    with start() as group:
        worker = group.workers[0]
        worker.stdin.write('{"do": "wait"}\n')
        worker.stdin.close()
        deadline = time.monotonic() + 20
        while not has_ended(worker) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert worker.returncode == 0


def test_a_module_that_does_not_start(tmp_path):
    with pytest.raises(RuntimeError, match=r"worker 0 of 1[^$]*No module named"):
        Processes("no_such_module", 1, tmp_path)


def test_costs_are_differences_of_neighbouring_blocks():
    """Medians by hand: each block differs, and the middle one is the median."""
    times = {
        "ours ring": [10.0, 12.0, 11.0],
        "ours doubling": [8.0, 9.0, 7.0],
        "ours native": [20.0, 22.0, 24.0],
        "theirs ddp": [9.0, 8.0, 16.0],
        "ours alone": [4.0, 5.0, 6.0],
        "ours beside": [5.0, 7.0, 6.0],
        "theirs alone": [2.0, 3.0, 1.0],
        "theirs beside": [4.0, 4.0, 4.0],
    }
    blocks = [{name: each[i] for name, each in times.items()} for i in range(3)]
    ring, doubling, _ = distributing._costs(blocks, "cnn", 2)
    assert (ring.design, ring.model, ring.processes) == ("RingAllReduce()", "cnn", 2)
    assert ring.blocks == 3
    assert ring.ours_ms[1] == 11
    assert ring.ours_cost_ms[1] == 6  # of 6, 7, 5
    assert ring.theirs_cost_ms[1] == 7  # of 7, 5, 15
    assert ring.more_ms[1] == -1  # of -1, 2, -10
    assert ring.more_beside_ms[1] == 0  # of 5 - 5, 5 - 4, 5 - 12
    assert ring.ratio[1] == 10 / 9  # of 10 / 9, 12 / 8, 11 / 16
    assert ring.holds and doubling.holds
    assert doubling.more_ms[1] == -3  # of -3, -1, -14


def test_without_pytorch_there_is_nothing_to_compare(monkeypatch):
    monkeypatch.setattr(distributing.importlib.util, "find_spec", lambda name: None)
    assert "PyTorch is not installed" in distributing.missing()
    assert distributing.rows(1.0) == []


def test_one_process_keeps_to_one_core():
    from experiments.harness import processes

    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("the system has no affinities")
    before = os.sched_getaffinity(0)
    try:
        processes.pin(len(before) + 1)
        assert os.sched_getaffinity(0) == {sorted(before)[1 % len(before)]}
    finally:
        os.sched_setaffinity(0, before)
