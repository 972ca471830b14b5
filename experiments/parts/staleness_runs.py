"""Runs every policy on every task, with and without a straggler, in virtual time."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import optax

from experiments.parts import staleness_tasks
from experiments.parts.staleness_tasks import Task
from jaxdp import asynchronous
from jaxdp.asynchronous import Bounded, Eventual, Link, LogNormal, Policy, Sequential

SYNCHRONOUS, NO_BOUND = "synchronous", "τ = ∞"
POLICIES: Mapping[str, Policy] = {
    SYNCHRONOUS: Sequential(),
    **{f"τ = {bound}": Bounded(bound) for bound in (0, 1, 2, 4, 8)},
    NO_BOUND: Eventual(),
}
EQUAL, STRAGGLER = "equal workers", "one straggler"
SPEEDS = (EQUAL, STRAGGLER)
EVERY = 2  # rounds between evaluations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The machines, and how long they train.

    Attributes:
        workers: Their number, W.
        rounds: A run applies W times as many pushes.
        compute_s: Median time of a gradient.
        noise: Standard deviation of its logarithm.
        slowdown: How much longer a straggler takes.
        link: Of the server, in each direction.
        seed: Of the times.
    """

    workers: int
    rounds: int
    compute_s: float
    noise: float
    slowdown: float
    link: Link
    seed: int

    @property
    def pushes(self) -> int:
        """How many a run applies."""
        return self.workers * self.rounds

    def times(self, speeds: str) -> list[LogNormal]:
        """What gradients take each worker; the last one may be a straggler."""
        slow = self.slowdown if speeds == STRAGGLER else 1.0
        medians = [self.compute_s] * (self.workers - 1) + [slow * self.compute_s]
        return [LogNormal(median, self.noise) for median in medians]


class Key(NamedTuple):
    """Names a run."""

    task: str
    optimizer: str
    speeds: str
    policy: str


Runs = Mapping[Key, asynchronous.Run]


def every_policy(
    tasks: Iterable[Task],
    optimizers: Iterable[str],
    setting: Setting,
    advance: Callable[[], Any],
) -> Runs:
    """All tasks, optimizers, speeds and policies."""
    keys = [
        (task, Key(task.name, optimizer, speeds, policy))
        for task in tasks
        for optimizer in optimizers
        for speeds in SPEEDS
        for policy in POLICIES
    ]
    runs = {}
    for task, key in keys:
        policy = POLICIES[key.policy]
        runs[key] = train(task, policy, optimizer_of(key, setting), setting, key.speeds)
        advance()
    return runs


def optimizer_of(key: Key, setting: Setting) -> optax.GradientTransformation:
    """The optimizer of a run, at the same rate per sample under every policy."""
    if key.policy == SYNCHRONOUS:
        rate = staleness_tasks.RATES[key.task][key.optimizer]
    else:
        rate = staleness_tasks.rate_of_a_push(key.task, key.optimizer, setting.workers)
    return staleness_tasks.optimizer(key.optimizer, rate)


def train(
    task: Task,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    setting: Setting,
    speeds: str,
) -> asynchronous.Run:
    """Trains until `setting.pushes` are applied, and proves the log."""
    in_an_update = policy.pushes_per_update(setting.workers)
    run = asynchronous.simulate(
        task.loss_fn,
        optimizer,
        task.params,
        task.batches,
        workers=setting.workers,
        policy=policy,
        updates=setting.pushes // in_an_update,
        iterations=4 * setting.rounds,  # a run that diverges must end too
        compute=setting.times(speeds),
        link=setting.link,
        seed=setting.seed,
        evaluate=task.evaluate,
        evaluate_every=EVERY * max(setting.workers // in_an_update, 1),
    )
    run.verify()
    return run
