"""One delay for all: the same pushes, each exactly so many updates old.

`n + 1` workers of one speed, without communication, push in turns: a gradient is `n`
updates old when it is applied. Beside it, what claim CB5 compares a delay with: a
larger batch, all of whose gradients are of the same weights, at the same rate per
sample.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from experiments.harness.result import Rows
from experiments.parts import staleness_tasks
from experiments.parts.staleness_curves import Curve, curve
from experiments.parts.staleness_runs import EVERY, Setting
from experiments.parts.staleness_tasks import Task
from jaxdp import asynchronous

DELAYS = (0, 1, 2, 4, 8)  # rounds of W updates each
LARGER_BATCH = "SGD, larger batch"
Curves = Mapping[tuple[str, str], Mapping[int, Curve]]  # by task and optimizer; delay


def every_delay(
    tasks: Iterable[Task],
    optimizers: Iterable[str],
    setting: Setting,
    advance: Callable[[], Any],
) -> Curves:
    """All tasks, optimizers and delays, and the larger batches."""
    found = {}
    for task in tasks:
        for name in (*optimizers, LARGER_BATCH):
            curves = found[task.name, name] = {}
            for delay in DELAYS:
                optimizer, workers = _way(task, name, delay, setting.workers)
                run = _train(task, optimizer, workers, setting)
                curves[delay] = curve(run)
                advance()
    return found


def rows(curves: Curves) -> Rows:
    """A column for each delay."""
    return [
        {"data": task, "optimizer": name}
        | {
            column(delay): curve.in_words(curve.mean)
            for delay, curve in by_delay.items()
        }
        | {
            "label": "average of the loss over all pushes, by their delay; a larger "
            "batch has no delay, but so many rounds more"
        }
        for (task, name), by_delay in curves.items()
    ]


def column(delay: int) -> str:
    """The heading of a delay."""
    return f"{delay} rounds"


def _way(
    task: Task, name: str, delay: int, in_a_round: int
) -> tuple[optax.GradientTransformation, int]:
    """The optimizer, and the workers that make the delay."""
    if name != LARGER_BATCH:
        rate = staleness_tasks.rate_of_a_push(task.name, name, in_a_round)
        return staleness_tasks.optimizer(name, rate), 1 + in_a_round * delay
    rate = staleness_tasks.RATES[task.name]["SGD"] * (delay + 1)
    steps = optax.MultiSteps(optax.sgd(rate), in_a_round * (delay + 1))
    return optax.with_extra_args_support(steps.gradient_transformation()), 1


def _train(
    task: Task,
    optimizer: optax.GradientTransformation,
    workers: int,
    setting: Setting,
) -> asynchronous.Run:
    """As many pushes as in the other runs."""
    return asynchronous.simulate(
        task.loss_fn,
        optimizer,
        task.params,
        task.batches,
        workers=workers,
        policy=asynchronous.Eventual(),
        updates=setting.pushes,
        iterations=4 * setting.pushes,  # a run that diverges must end too
        evaluate=task.evaluate,
        evaluate_every=EVERY * setting.workers,
    )
