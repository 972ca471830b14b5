"""Experiments that the ledger has run: how they end, and that none is left."""

import re
import signal
import sys
import time

import pytest

from experiments.ledger import running

CHILD = """
import signal, sys, time
name, *options = sys.argv[1:]
if name == "stuck":
    try:
        print("stuck", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("cleared up", flush=True)
elif name == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(60)
elif name == "broken":
    print("\\n".join(f"line {i}" for i in range(20)))
    sys.exit(3)
"""


@pytest.fixture
def child(monkeypatch):
    """Runs a small program instead of experiments."""
    monkeypatch.setattr(running, "COMMAND", (sys.executable, "-c", CHILD))


def test_jobs_run_in_processes_and_say_how_they_ended(tmp_path, child):
    jobs = [
        running.Job(name, [], tmp_path / "logs" / f"{name}.txt")
        for name in ("fine", "broken")
    ]
    ended = running.run_all(jobs, at_once=2)
    assert ended["fine"].failure == ""
    first, *lines = ended["broken"].failure.split("\n")
    assert re.match(
        r"ended with status 3 after \d+ s; the last lines of .*n.txt:", first
    )
    assert lines == [f"  line {i}" for i in range(12, 20)]


def test_a_job_that_does_not_end_is_interrupted(tmp_path, child, monkeypatch):
    job = running.Job("stuck", [], tmp_path / "stuck.txt")

    class Clock:
        sleep = time.sleep

        def monotonic(self):  # an hour passes when it has started
            started = job.log.exists() and "stuck" in job.log.read_text()
            return 3601.0 if started else 0.0

    monkeypatch.setattr(running, "time", Clock())
    ended = running.run_all([job], at_once=1)
    assert ended["stuck"].failure.startswith("did not end within 3600 s; the last")
    assert ended["stuck"].failure.endswith("\n  stuck\n  cleared up")


def test_no_job_outlives_an_interrupt(tmp_path, child, monkeypatch):
    job = running.Job("deaf", [], tmp_path / "deaf.txt")
    started = []

    def interrupt(running_job, limit_s):
        if "deaf" not in job.log.read_text():
            return False
        started.append(running_job._process)
        raise KeyboardInterrupt

    monkeypatch.setattr(running._Running, "over", interrupt)
    monkeypatch.setattr(running, "PATIENCE_S", 0.2)
    with pytest.raises(KeyboardInterrupt):
        running.run_all([job], at_once=1)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
