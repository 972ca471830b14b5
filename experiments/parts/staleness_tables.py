"""What every policy reached, by pushes and by time, and what its workers did."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from experiments.harness.result import Rows
from experiments.parts.staleness_curves import LAST, curve
from experiments.parts.staleness_runs import NO_BOUND, POLICIES, Key, Runs, Setting
from experiments.parts.staleness_tasks import Task
from jaxdp.asynchronous import Run

Group = tuple[str, str, str]
GROUP = ("data", "optimizer", "workers")


def groups(runs: Runs) -> list[Group]:
    """What policies are compared on."""
    return list(dict.fromkeys(key[:3] for key in runs))


def equal_ms(runs: Runs, group: Group) -> float:
    """When the run without a bound has made all its pushes."""
    return 1e3 * runs[Key(*group, NO_BOUND)].duration_s


def messages(tasks: Iterable[Task], setting: Setting) -> Rows:
    """What a push or a pull takes, beside computing."""
    link, in_a_round = setting.link, setting.workers
    rows = []
    for task in tasks:
        message_s = link.alpha_s + task.size_bytes * link.beta_s_per_byte
        row = {
            "data": task.name,
            "parameters": task.params.size,
            "message_bytes": task.size_bytes,
            "message_ms": 1e3 * message_s,
            "all workers' messages_ms": 1e3 * message_s * in_a_round,
            "gradient_ms": 1e3 * setting.compute_s,
            "label": "a pull or a push, alone, and of all workers one after another; "
            "pulls and pushes do not hinder each other",
        }
        rows.append(row)
    return rows


def mean_losses(runs: Runs) -> Rows:
    """At equally many pushes: the whole curve."""
    label = "average of the loss over all pushes of a run, the same number in each"
    return _by_policy(runs, lambda run, _: curve(run).mean, label)


def last_losses(runs: Runs) -> Rows:
    """At equally many pushes: its end."""
    label = f"average of the loss over the last {LAST:.0%} of the pushes"
    return _by_policy(runs, lambda run, _: curve(run).at_the_end, label)


def test_losses(runs: Runs, tasks: Iterable[Task]) -> Rows:
    """After all pushes, on data that was not trained on."""
    test = {task.name: task.test for task in tasks}
    label = "loss of data that was not trained on, of the last version"
    return _by_policy(runs, lambda run, group: test[group[0]](run.params), label)


def timely_losses(runs: Runs) -> Rows:
    """At equal virtual time."""
    label = (
        f"average of the loss over the last {LAST:.0%} of the time in which the run "
        "without a bound makes all its pushes"
    )
    rows = _by_policy(
        runs, lambda run, group: curve(run).at_ms(equal_ms(runs, group)), label
    )
    times = [equal_ms(runs, group) for group in groups(runs)]
    return [
        {column: row[column] for column in GROUP} | {"time_ms": time, **row}
        for row, time in zip(rows, times, strict=True)
    ]


def _by_policy(runs: Runs, measure: Callable[[Run, Group], float], label: str) -> Rows:
    """A column for each policy."""
    rows = []
    for group in groups(runs):
        row: dict[str, Any] = dict(zip(GROUP, group, strict=True))
        for policy in POLICIES:
            run = runs[Key(*group, policy)]
            row[policy] = curve(run).in_words(measure(run, group))
        rows.append(row | {"label": label})
    return rows


def what_workers_do(runs: Runs, optimizer: str) -> Rows:
    """Staleness, and where the time goes; the optimizer does not change it."""
    return [
        {"data": key.task, "workers": key.speeds, "policy": key.policy} | activity(run)
        for key, run in runs.items()
        if key.optimizer == optimizer
    ]


def activity(run: Run) -> dict[str, float | int | str]:
    """What the workers of one run did, on average."""
    ages = np.repeat([*run.staleness], [*run.staleness.values()])
    computing, waiting = run.utilisation.mean(), run.wait_share.mean()
    return {
        "pushes per second": sum(run.applied) / run.duration_s,
        "computing (%)": 100 * float(computing),
        "pull and push (%)": 100 * float(1 - computing - waiting),
        "waiting (%)": 100 * float(waiting),
        "compute / rest": run.compute_to_communication,
        "mean staleness": float(ages.mean()),
        "highest staleness": int(ages.max()),
        "label": "staleness: updates made between pull and push; compute / rest: time "
        "of computing over that of pull, push and wait, all workers together",
    }


def numbers(row: Mapping[str, Any], columns: Iterable[str]) -> list[float]:
    """Losses of a row; "diverged" is infinite."""
    cells = [row[column] for column in columns]
    return [cell if isinstance(cell, float) else math.inf for cell in cells]
