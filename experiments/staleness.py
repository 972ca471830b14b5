"""What does an asynchronous parameter server gain in time, and lose in every step?

Command:   make experiment EXP=staleness       ARGS="--workers 16 --slowdown 8"
Hardware:  any; gradients are computed on one device, one after another.
Runtime:   about 3 min on two cores.

W = 8 workers pull parameters from a server, compute the gradient of a few rows, and
push it. Synchronous: an update averages one push of each. Asynchronous: every push is
an update at once, and no worker is more than τ iterations ahead of the slowest; τ = ∞
is no bound. A small CNN learns digits and a transformer of 70,592 parameters learns
text, for 400 pushes, with the same rate per sample under every policy.

Gradients are real, time is virtual: 3 ms for a gradient, give or take 10 %, and 50 µs
and 10 Gbit/s for messages through the server's link, as small workers have on Ethernet.
The ratio matters: in a round, all messages of one direction take 1.4 ms (digits) or
2.2 ms (text), beside those 3 ms. A straggler takes 4 times as long.

Expected numbers; times are those of digits:
                            equal workers         beside a straggler
                            synchronous   τ = ∞   synchronous  τ = 8   τ = ∞   backup
  pushes per second               1,670   2,330           580    690   2,120    1,520
  compute / other time              1.7     7.5          0.43   0.52     8.3
  mean staleness, updates             0     6.9             0    4.1     6.9        0

  loss at equal steps   higher with every longer delay, where all pushes have the same
  but τ is no delay     W - 1 = 7 other workers push meanwhile, whatever the bound: with
                        equal workers, runs with τ = 2 and more are the same run
  loss at equal time    beside a straggler lower without a bound than synchronous, for
                        both data sets and all optimizers
"""

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from experiments.harness import config as harness
from experiments.harness import show
from experiments.harness.result import Result, Rows
from experiments.parts import staleness_answers as answers
from experiments.parts import staleness_claims as claims
from experiments.parts import staleness_delays as delays
from experiments.parts import staleness_figures as figures
from experiments.parts import staleness_runs as runs
from experiments.parts import staleness_tables as tables
from experiments.parts import staleness_tasks as tasks
from experiments.parts.staleness_runs import STRAGGLER, Key, Setting
from jaxdp.asynchronous import Link

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TINY_ROUNDS = 8
FIRST = "SGD"  # of the optimizers; the only one in tiny form
LANES = {"synchronous": runs.SYNCHRONOUS, "1 ahead": "τ = 1", "no bound": runs.NO_BOUND}
DRAWN = 4.5  # gradients of the straggler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 1  # gradients are computed on the first; workers are virtual
    workers: int = 8
    rounds: int = 50  # a run applies as many pushes per worker
    compute_ms: float = 3.0  # median of a gradient
    noise: float = 0.1  # standard deviation of its logarithm
    slowdown: float = 4.0  # how much longer the straggler takes
    latency_us: float = 50.0  # of a message
    bandwidth_gbit_s: float = 10.0  # of the server's link, in each direction
    seed: int = 0  # of parameters, batches and times

    def check(self) -> None:
        """Checks the options."""
        super().check()
        if self.workers < 2:
            raise ValueError(
                f"--workers got {self.workers}. A backup worker and another one make "
                "at least 2. Use --workers 8."
            )
        positive = ("rounds", "compute_ms", "slowdown", "bandwidth_gbit_s")
        for name in (*positive, "noise", "latency_us"):
            value = getattr(self, name)
            if 0 <= value < math.inf and (value or name not in positive):
                continue
            raise ValueError(
                f"--{name.replace('_', '-')} got {value}. It must be finite and "
                f"{'more than 0' if name in positive else '0 or more'}, or virtual "
                f"time does not go on. Use {getattr(type(self), name)}, the default."
            )


@harness.full_precision
def run(config: Config) -> Result:
    """Answers the question."""
    setting = make_setting(config)
    trained = [tasks.digits_task(config.seed)]
    if not config.tiny:
        trained.append(tasks.text_task(config.seed))
    optimizers = [FIRST] if config.tiny else [*tasks.OPTIMIZERS]
    total = len(trained) * count_runs(len(optimizers))
    with show.progress("training", total) as advance:
        found = runs.every_policy(trained, optimizers, setting, advance)
        curves = delays.every_delay(trained, optimizers, setting, advance)
        answered = answers.every_answer(trained, setting, advance)
    activity = tables.what_workers_do(found, FIRST)
    mean, timely = tables.mean_losses(found), tables.timely_losses(found)
    delayed = delays.rows(curves)
    return Result(
        claims=[
            claims.never_wait(activity),
            claims.slows_convergence(delayed, mean, timely, activity),
        ],
        tables={
            "loss_at_equal_virtual_time": timely,
            "mean_loss_over_equally_many_pushes": mean,
            "loss_after_equally_many_pushes": tables.last_losses(found),
            "test_loss_after_equally_many_pushes": tables.test_losses(found, trained),
            "mean_loss_by_exact_delay": delayed,
            "what_workers_do": activity,
            "answers_to_staleness_and_stragglers": answers.rows(answered),
            "messages": tables.messages(trained, setting),
        },
        figures={
            **draw_workers(found, answered, setting),
            **draw_losses(found, timely, curves),
        },
    )


def make_setting(config: Config) -> Setting:
    """The machines; seconds and bytes."""
    return Setting(
        workers=config.workers,
        rounds=TINY_ROUNDS if config.tiny else config.rounds,
        compute_s=config.compute_ms / 1e3,
        noise=config.noise,
        slowdown=config.slowdown,
        link=Link(config.latency_us / 1e6, 8 / (config.bandwidth_gbit_s * 1e9)),
        seed=config.seed,
    )


def count_runs(optimizers: int) -> int:
    """How many runs a data set has."""
    policies = optimizers * len(runs.SPEEDS) * len(runs.POLICIES)
    return (
        policies
        + (optimizers + 1) * len(delays.DELAYS)
        + len(answers.answers(rate=1.0, workers=2))
    )


def draw_losses(
    found: runs.Runs, timely: Rows, curves: delays.Curves
) -> "dict[str, Figure]":
    """Over time, over pushes, and by delay."""
    drawn = {"Loss at equal virtual time": figures.at_equal_time(timely)}
    for over_time, speeds in itertools.product((True, False), reversed(runs.SPEEDS)):
        over = "virtual time" if over_time else "pushes"
        figure = figures.losses(found, speeds, over_time)
        drawn[f"Loss over {over}, {speeds}"] = figure
    return drawn | {"Mean loss by exact delay": figures.exact_delays(curves)}


def draw_workers(
    found: runs.Runs, answered: answers.Answers, setting: Setting
) -> "dict[str, Figure]":
    """What workers do beside a straggler, and how stale pushes are."""
    shown = {
        name: found[Key("digits", FIRST, STRAGGLER, policy)]
        for name, policy in LANES.items()
    }
    shown |= {"a backup worker": answered["digits", answers.BACKUP]}
    until_s = DRAWN * setting.slowdown * setting.compute_s
    drawn = {
        f"Workers beside a straggler, {name}": run.draw(until_s=until_s)
        for name, run in shown.items()
    }
    return drawn | {"Staleness": figures.staleness(found, "digits", FIRST)}
