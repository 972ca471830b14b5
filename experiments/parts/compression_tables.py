"""Tables of compressed runs: bytes beside their formula, and losses."""

import itertools
from collections.abc import Sequence

import numpy as np

from experiments.harness.result import Rows
from experiments.parts.compression_runs import COMPRESSIONS, UNCOMPRESSED, Run, Runs
from experiments.parts.compression_tasks import Task
from experiments.parts.compression_traffic import formula_bytes

PARTS = 40  # of a run, whose losses are averaged


def sent(runs: Runs, tasks: Sequence[Task], devices: int) -> Rows:
    """What a device sends in a step, counted and by formula."""
    shapes = {task.name: task.shapes for task in tasks}
    return [
        {
            "data": task,
            "compression": name,
            "sent_bytes": run.sent_bytes,
            "formula_bytes": round(
                formula_bytes(COMPRESSIONS[name], shapes[task], devices)
            ),
            "times less": runs[task, UNCOMPRESSED].sent_bytes / run.sent_bytes,
        }
        for (task, name), run in runs.items()
    ]


def learned(runs: Runs) -> Rows:
    """What each run reached."""
    return [
        {
            "data": task,
            "compression": name,
            "training loss": run.last_loss,
            "test loss": run.test_loss,
            "test loss above uncompressed (%)": above(runs, task, name),
            "test accuracy": run.accuracy,
        }
        for (task, name), run in runs.items()
    ]


def above(runs: Runs, task: str, name: str) -> float:
    """By how many percent a test loss is higher than without compression."""
    return 100 * (runs[task, name].test_loss / runs[task, UNCOMPRESSED].test_loss - 1)


def by_step(runs: Runs, task: str) -> Rows:
    """The training loss of every run, one row for each part of the steps."""
    of = {name: curve(run) for (data, name), run in runs.items() if data == task}
    steps = [end for end, _ in next(iter(of.values()))]
    return [
        {"until step": end, **{name: points[i][1] for name, points in of.items()}}
        for i, end in enumerate(steps)
    ]


def curve(run: Run) -> list[tuple[int, float]]:
    """The last step of every part of a run, and the mean loss of the part."""
    losses = np.array(run.losses)
    ends = np.linspace(0, len(losses), min(PARTS, len(losses)) + 1).astype(int)
    return [
        (int(end), float(losses[start:end].mean()))
        for start, end in itertools.pairwise(ends)
    ]
