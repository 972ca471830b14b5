"""Answers to staleness and to a straggler, with plain SGD and one straggler."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import optax

from experiments.harness.result import Rows
from experiments.parts import staleness_runs, staleness_tasks
from experiments.parts.staleness_curves import curve
from experiments.parts.staleness_runs import (
    NO_BOUND,
    POLICIES,
    STRAGGLER,
    SYNCHRONOUS,
    Setting,
)
from experiments.parts.staleness_tasks import Task
from jaxdp.asynchronous import Backup, Policy, Run
from jaxdp.staleness import compensate_delay, scale_by_staleness

BACKUP = "synchronous, 1 backup worker"
TIMES_W = "synchronous, W times the rate"
FULL_RATE = "τ = ∞, rate not divided by W"
DIVIDED = "τ = ∞, rate divided by staleness"
COMPENSATED = "τ = ∞, delay compensated"
STRENGTH, DECAY = 2.0, 0.95  # of DC-ASGD-a, as in its paper


class Answer(NamedTuple):
    """A policy, and what is applied to gradients at which rate."""

    policy: Policy
    optimizer: optax.GradientTransformation


Answers = Mapping[tuple[str, str], Run]  # by task and answer


def answers(rate: float, workers: int) -> dict[str, Answer]:
    """All of them, for the rate of the synchronous run."""
    eventual = POLICIES[NO_BOUND]
    sgd = staleness_tasks.optimizer("SGD", rate)
    small = staleness_tasks.optimizer("SGD", rate / workers)
    large = staleness_tasks.optimizer("SGD", rate * workers)
    divided = optax.chain(sgd, scale_by_staleness())
    compensated = optax.chain(compensate_delay(STRENGTH, DECAY), small)
    return {
        SYNCHRONOUS: Answer(POLICIES[SYNCHRONOUS], sgd),
        BACKUP: Answer(Backup(1), sgd),
        TIMES_W: Answer(POLICIES[SYNCHRONOUS], large),
        NO_BOUND: Answer(eventual, small),
        FULL_RATE: Answer(eventual, sgd),
        DIVIDED: Answer(eventual, divided),
        COMPENSATED: Answer(eventual, compensated),
    }


def every_answer(
    tasks: Iterable[Task], setting: Setting, advance: Callable[[], Any]
) -> Answers:
    """All tasks and answers."""
    found = {}
    for task in tasks:
        rate = staleness_tasks.RATES[task.name]["SGD"]
        for name, (policy, optimizer) in answers(rate, setting.workers).items():
            run = staleness_runs.train(task, policy, optimizer, setting, STRAGGLER)
            found[task.name, name] = run
            advance()
    return found


def rows(found: Answers) -> Rows:
    """What each answer reached."""
    kept = []
    for (task, name), run in found.items():
        of = curve(run)
        end_ms = 1e3 * found[task, NO_BOUND].duration_s
        kept.append(
            {
                "data": task,
                "run": name,
                "update_ms": 1e3 * run.duration_s / max(run.updates, 1),
                "pushes per second": sum(run.applied) / run.duration_s,
                "pushes applied": sum(run.applied),
                "pushes dropped": sum(run.dropped),
                "mean loss": of.in_words(of.mean),
                "loss at the end": of.in_words(of.at_the_end),
                "loss at equal time": of.in_words(of.at_ms(end_ms)),
                "label": "SGD, one straggler; losses as in the tables above",
            }
        )
    return kept
