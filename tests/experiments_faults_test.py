"""`faults`: the plan of kills, what is read from logs and messages, and the state."""

import itertools
import json
import pathlib
import subprocess

import numpy as np
import optax
import pytest

import jaxdp
from experiments import faults
from experiments.parts import faults_figures as figures
from experiments.parts import faults_kills as kills
from experiments.parts import faults_others as others
from experiments.parts import faults_training as training
from experiments.parts.faults_kills import SAVE, START, STEP, Done, Kill
from experiments.parts.faults_launch import Failure, Launch, Message
from experiments.parts.faults_process import STARTED
from jaxdp.checkpoint import Checkpoints, CheckpointWarning
from tests.helpers import assert_bit_equal


class _Ended(Launch):
    """A training that has ended, without any process."""

    def __init__(self, folder, rows=(), messages=()):
        self.folder, self.processes, self.start_s = folder, 2, 100.0
        self.messages = [Message(*message) for message in messages]
        lines = [json.dumps(row) for row in rows]
        (folder / training.LOSSES).write_text("".join(f"{line}\n" for line in lines))


def rows_of(*steps, start_s=101.0, gap_s=1.0):
    """Rows of a log: steps a second apart, each with a loss of its own."""
    return [
        {"step": step, "loss": (0.5 * step).hex(), "time_s": start_s + i * gap_s}
        for i, step in enumerate(steps)
    ]


def test_kills_are_spread_over_the_training_and_its_moments():
    planned = kills.plan(20, steps=200, save_every=10, processes=3, seed=7)
    assert (
        planned == kills.plan(20, 200, 10, 3, seed=7) != kills.plan(20, 200, 10, 3, 8)
    )
    for i, kill in enumerate(planned):
        assert 10 * i <= kill.step < 10 * i + 10 or kill.step == max(kill.step, 1) == 10
        assert 1 <= kill.step <= 198
        assert kill.moment != SAVE or kill.step % 10 == 0
    moments = [kill.moment for kill in planned]
    assert [moments.count(each) for each in (STEP, SAVE, START)] == [10, 5, 5]
    assert {kill.rank for kill in planned} == {0, 1, 2}
    assert len({kill.part for kill in planned}) == 20
    (single,) = kills.plan(1, steps=12, save_every=4, processes=2, seed=0)
    assert 1 <= single.step <= 10


def test_more_kills_than_steps():
    assert len(kills.plan(9, steps=4, save_every=2, processes=2, seed=0)) == 9


def test_the_pace_of_a_training(tmp_path):
    """Steps of 1 s, and 1.5 s where step 2 or 4 is saved."""
    times = [0.0, 1.0, 2.5, 3.5, 5.0, 6.0]
    rows = [{"step": i + 1, "time_s": 107 + t} for i, t in enumerate(times)]
    assert kills.pace(_Ended(tmp_path, rows), save_every=2) == (7.0, 1.0, 0.5)


def test_a_torn_line_is_not_read_yet(tmp_path):
    launch = _Ended(tmp_path, rows_of(1, 2))
    with (tmp_path / training.LOSSES).open("a") as log:
        log.write('{"step": 3, "lo')
    assert [row["step"] for row in launch.losses()] == [1, 2]
    (tmp_path / training.LOSSES).unlink()
    assert launch.losses() == []


def test_messages_of_the_launcher(tmp_path):
    """One rank is seen first and another one named; then the last one left fails."""
    launch = _Ended(
        tmp_path,
        messages=[
            (1.0, "[launch] rank 0 of 2 has ended: exit code 1. The others are"),
            (2.0, "[launch] rank 1 of 2 failed first: killed by SIGKILL, 3 s after"),
            (3.0, "[launch]     Traceback of rank 7"),
            (4.0, "[launch] rank 0 of 2 failed first: exit code 9, 1 s after"),
        ],
    )
    assert launch.failures() == [
        Failure(1.0, 2.0, 1, "killed by SIGKILL, 3 s after"),
        Failure(4.0, 4.0, 0, "exit code 9, 1 s after"),
    ]


def test_what_became_of_kills(tmp_path, monkeypatch):
    """Saved at 2: the first kill costs step 3, the second comes before any step."""
    rows = [*rows_of(1, 2, 3), *rows_of(3, 4, start_s=120.0)]
    rows[-1]["loss"] = (0.25).hex()
    messages = [
        (99.0, "rank 1 of 2 failed first: a port was taken"),
        (105.5, "rank 0 of 2 has ended: killed"),
        (106.0, "rank 1 of 2 failed first: killed by SIGKILL, 6 s after"),
        (112.0, "rank 0 of 2 failed first: killed by SIGKILL, 4 s after"),
    ]
    launch = _Ended(tmp_path, rows, messages)
    expected = {row["step"]: row["loss"] for row in rows_of(1, 2, 3, 4)}
    done = [
        Done(Kill(STEP, 3, 0.5, 1), 105.0, False),
        Done(Kill(START, 5, 0.5, 1), 110.0, True),
    ]
    first, second = kills.became(done, launch, expected)
    assert first == {
        "kill": 1,
        "moment": STEP,
        "rank": 1,
        "at_s": 5.0,
        "named": 1,
        "how": "killed by SIGKILL",
        "noticed_s": 0.5,
        "ended_s": 1.0,
        "last step": 3,
        "goes on at": 3,
        "steps lost": 1,
        "back_s": 15.0,
        "compared": 0,
        "identical": True,
        "saving": False,
    }
    assert (second["rank"], second["named"], second["noticed_s"]) == (1, 0, 2.0)
    assert (second["compared"], second["identical"]) == (2, False)
    monkeypatch.setattr(launch, "orphans", lambda: [])
    row = faults.summary([first, second], launch, True, kills.Pace(1.0, 2.0, 3.0))
    assert (row["identical"], row["named as killed"], row["kills"]) == (1, 1, 2)
    assert (row["steps compared"], row["while saving"]) == (2, 1)
    assert (row["longest_back_s"], row["hangs"], row["other failures"]) == (15.0, 0, 1)


class _Failing(_Ended):
    """Its first process has ended by itself, and the second one is to be killed."""

    def __init__(self, folder, processes):
        super().__init__(folder)
        self.started, self.failed = processes, 0

    def failures(self):
        return [Failure(1.0, 2.0, 0, "")] * self.failed

    def process(self, rank):
        return self.started[self.failed]

    def until(self, what, named):
        self.failed += 1
        assert what()
        return what()


def test_who_has_ended_by_itself_is_killed_in_the_next_attempt(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    with subprocess.Popen(["sleep", "60"]) as process:
        launch = _Failing(tmp_path, [ended.pid, process.pid])
        planned = [Kill(START, 1, 0.0, 0)]
        (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
        (done,) = kills.carry_out(planned, launch, tmp_path, kills.Pace(0, 0, 0))
        process.wait(20)
    assert (process.returncode, done.kill, done.saving) == (-9, planned[0], True)
    assert launch.failed == 2


def test_what_is_left_of_a_training_is_seen(tmp_path):
    launch = _Ended(tmp_path)
    (tmp_path / STARTED).mkdir()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            assert launch.orphans() == []
            (tmp_path / STARTED / "0.1").write_text(str(process.pid))
            assert launch.orphans() == [process.pid]
        finally:
            process.kill()
    assert launch.orphans() == []


def test_a_line_is_broken_at_a_kill():
    """The first kill comes right after a save, so that no step is repeated."""
    log = [(1.0, 1), (2.0, 2), (7.0, 3), (8.0, 4), (9.0, 3)]
    seconds, steps = figures._lines(log, [{"at_s": 2.5}, {"at_s": 8.1}])
    np.testing.assert_equal(seconds, [1, 2, np.nan, 7, 8, np.nan, 9])
    np.testing.assert_equal(steps, [1, 2, np.nan, 3, 4, np.nan, 3])


OPTIONS = training.Options(60, 10, 64, 0.0, 10.0, "")


def digits():
    random = np.random.default_rng(3)
    return {
        "x": random.random((20, 64), np.float32),
        "y": random.integers(0, 10, 20, np.int32),
    }


def take(feed, count):
    return [*itertools.islice(iter(feed), count)]


def test_batches_go_on_where_they_stood():
    """20 rows in batches of 6: the third epoch begins with batch 7."""
    straight = take(training.Feed(digits(), 6), 9)
    before, after = training.Feed(digits(), 6), training.Feed(digits(), 6)
    take(before, 4)
    after.restore(json.loads(json.dumps(before.state())))
    assert_bit_equal(take(after, 5), straight[4:])
    noises = [batch["x"].tobytes() for batch in straight]
    assert len(set(noises)) == 9


def test_a_checkpoint_holds_the_whole_state(tmp_path):
    feed, other = training.Feed(digits(), 6), training.Feed(digits(), 6)
    train = jaxdp.data_parallel(
        training.loss_fn, optax.adam(0.1), jaxdp.data_mesh(1), jaxdp.RingAllReduce()
    )
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    step, first = training.resumed(checkpoints, train, other)
    assert step == 0 and other.state() == training.Feed(digits(), 6).state()
    digest = training.digest(first)
    (batch,) = take(feed, 1)
    state, _ = train.step(first, batch)
    checkpoints.save(train, state, feed.state())
    checkpoints.wait()
    (tmp_path / "checkpoints" / "tmp-00000002").mkdir()
    with pytest.warns(CheckpointWarning, match="tmp-00000002"):
        step, restored = training.resumed(checkpoints, train, other)
    assert step == 1 and other.state() == feed.state()
    assert_bit_equal(restored, state)
    assert training.digest(restored) == training.digest(state) != digest
    assert not (tmp_path / "checkpoints" / "tmp-00000002").exists()


@pytest.mark.skipif(bool(others.no_small_disk()), reason="no small disk here")
def test_a_small_disk_fills_up_and_goes(tmp_path):
    with others._small_disk(tmp_path / "disk") as disk:
        others._fill(disk / "ballast")
        size = (disk / "ballast").stat().st_size
        assert 0.9 * others.DISK_MB * 2**20 < size <= others.DISK_MB * 2**20
        with pytest.raises(OSError, match=others.CAUSE):
            (disk / "more").write_bytes(bytes(8192))
    assert not [*(tmp_path / "disk").iterdir()]


def test_what_cannot_be_made_here_says_why(monkeypatch):
    monkeypatch.setattr(others, "stopped", lambda problem: {"fault": "s", "named": 1})
    monkeypatch.setattr(others, "no_small_disk", lambda: "no disk")
    monkeypatch.setattr(others, "no_links", lambda: "no links")
    problem = others.Problem(
        *(pathlib.Path(), pathlib.Path(), OPTIONS, 2),
        *({}, set(), 0),
    )
    assert faults.befall(problem, lambda: None) == [
        {"fault": "s", "named": 1, "says": None},
        {"fault": "full disk", "named": None, "says": "no disk"},
        {"fault": "cut link", "named": None, "says": "no links"},
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 2}, "--devices got 2.*--processes"),
        ({"platform": "gpu"}, "--platform gpu.*one CPU device"),
        ({"processes": 1}, "--processes got 1.*2 processes"),
        ({"kills": 0}, "--kills 0.*a kill"),
        ({"steps": 19}, "--steps 19 and --save-every 10.*two saves"),
        ({"save_every": 0}, "--save-every 0"),
        ({"processes": 3}, "--batch-size got 64 for 3.*--batch-size 96"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        faults.Config(**options).check()
