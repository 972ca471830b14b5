"""Random kills of a training: the plan, the deed, and what became of each."""

import contextlib
import itertools
import os
import pathlib
import random
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.harness.result import Rows
from experiments.parts.faults_launch import Launch

STEP, SAVE, START = "in a step", "in a save", "at start-up"
SHARES = (STEP, SAVE, STEP, START)  # of every four kills


class Kill(NamedTuple):
    """A process to be killed.

    Attributes:
        moment: One of `STEP`, `SAVE`, `START`.
        step: After which step; at start-up, the first one that may be reached.
        part: Of the moment that passes before, from 0 to 1.
        rank: Who.
    """

    moment: str
    step: int
    part: float
    rank: int


class Pace(NamedTuple):
    """What moments take in a training without faults, in seconds."""

    start_s: float
    step_s: float
    save_s: float


class Done(NamedTuple):
    """A kill that was done, when, and whether a checkpoint was being written."""

    kill: Kill
    time_s: float
    saving: bool


def plan(
    count: int, steps: int, save_every: int, processes: int, seed: int
) -> list[Kill]:
    """Kills at random moments, spread over a training.

    Args:
        count: How many.
        steps: Of the training.
        save_every: Steps between two checkpoints.
        processes: How many there are.
        seed: Of everything random.
    """
    chance = random.Random(seed)
    moments = [SHARES[i % len(SHARES)] for i in range(count)]
    chance.shuffle(moments)
    kills = []
    for i, moment in enumerate(moments):
        low, high = i * steps // count, (i + 1) * steps // count
        step = min(chance.randrange(low, max(high, low + 1)), steps - 2)
        if moment == SAVE:
            step = max(step // save_every, 1) * save_every
        step = max(step, 1)
        kills.append(Kill(moment, step, chance.random(), chance.randrange(processes)))
    return kills


def pace(launch: Launch, save_every: int) -> Pace:
    """The times of a training that has ended without faults."""
    rows = launch.losses()
    gaps = {
        row["step"]: after["time_s"] - row["time_s"]
        for row, after in itertools.pairwise(rows)
    }
    saves = [gap for step, gap in gaps.items() if step % save_every == 0]
    others = [gap for step, gap in gaps.items() if step % save_every]
    step_s = sorted(others)[len(others) // 2]
    save_s = max(sorted(saves)[len(saves) // 2] - step_s, 0.0) if saves else step_s
    return Pace(rows[0]["time_s"] - launch.start_s, step_s, save_s)


def carry_out(
    kills: Sequence[Kill], launch: Launch, checkpoints: pathlib.Path, pace: Pace
) -> list[Done]:
    """Kills one process after the other; each makes the launcher start again."""
    done: list[Done] = []
    while len(done) < len(kills):
        kill = kills[len(done)]
        failures = len(launch.failures())
        process = launch.process(kill.rank)
        if kill.moment == START:
            time.sleep(kill.part * pace.start_s)
        else:
            wait_for_step(launch, kill.step)
            waits_s = pace.save_s if kill.moment == SAVE else pace.step_s
            time.sleep(kill.part * waits_s)
        saving = any("tmp" in path.name for path in checkpoints.glob("*"))
        # Where it has ended by itself, the kill is for the next attempt.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            done.append(Done(kill, time.time(), saving))
        launch.until(
            lambda before=failures: len(launch.failures()) > before,
            f"the report of kill {len(done)}",
        )
    return done


def wait_for_step(launch: Launch, step: int) -> None:
    """Waits until the present attempt has done a step."""
    failures = launch.failures()
    since_s = failures[-1].time_s if failures else 0.0

    def reached():
        rows = launch.losses()
        return rows and rows[-1]["time_s"] > since_s and rows[-1]["step"] >= step

    launch.until(reached, f"step {step}")


def became(done: Sequence[Done], launch: Launch, expected: Mapping[int, str]) -> Rows:
    """What became of each kill.

    Args:
        done: The kills.
        launch: A training that has ended.
        expected: The loss of every step without faults.
    """
    rows = []
    ends = [each.time_s for each in done[1:]] + [float("inf")]
    for each, end_s in zip(done, ends, strict=True):
        failure = next(f for f in launch.failures() if f.time_s > each.time_s)
        rows.append(
            {
                "kill": len(rows) + 1,
                "moment": each.kill.moment,
                "rank": each.kill.rank,
                "at_s": each.time_s - launch.start_s,
                "named": failure.rank,
                "how": failure.how.partition(",")[0],
                "noticed_s": round(failure.noticed_s - each.time_s, 2),
                "ended_s": round(failure.time_s - each.time_s, 2),
            }
            | resumption(launch, each.time_s, end_s, expected)
            | {"saving": each.saving}
        )
    return rows


def resumption(
    launch: Launch, fault_s: float, end_s: float, expected: Mapping[int, str]
) -> dict[str, Any]:
    """How a training went on after a fault, until the next one.

    `back_s` runs until the next step is done, over further kills if they come before.
    """
    logged = launch.losses()
    before = [row["step"] for row in logged if row["time_s"] <= fault_s]
    after = [row for row in logged if row["time_s"] > fault_s]
    resumed = [row for row in after if row["time_s"] <= end_s]
    last = before[-1] if before else 0
    return {
        "last step": last,
        "goes on at": after[0]["step"],
        "steps lost": last + 1 - after[0]["step"],
        "back_s": round(after[0]["time_s"] - fault_s, 2),
        "compared": len(resumed),
        "identical": all(row["loss"] == expected[row["step"]] for row in resumed),
    }
