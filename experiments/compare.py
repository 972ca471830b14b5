"""Do three ways to exchange gradients train the same network, and what do they cost?

Command:   make experiment EXP=compare         ARGS="--devices 4 --epochs 20"
Hardware:  any; without GPUs, 8 forced host devices.
Runtime:   about 25 s on two cores.

A small CNN (38,282 parameters, Φ = 153,128 bytes) learns scikit-learn's digits: 1,437
images of 8 x 8 for training, 360 for the test, SGD with momentum. A plain single-device
run and three designs start from the same parameters and see the same batches; their
programs differ only in how gradients travel.

Expected numbers, for N = 8 devices:
  star     GatherToRoot: 2 rounds; the root sends and receives 7 Φ, the others 1 Φ
  ring     RingAllReduce: 14 rounds; every device sends and receives 1.75 Φ
  native   NativeAllReduce: one all-reduce
  difference to the single device   below 1e-5 in each of the first 20 steps
  copies of the parameters          bit-identical on all devices after every step
  test accuracy                     above 0.95 for every design

Why runs drift apart at all: float32 addition is not associative. The gradient of 128
rows is summed in another order by every design, so its last bits differ; the next step
starts from parameters that differ by that much, and training amplifies it. Within one
run nothing drifts: all devices apply the same bits.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jaxdp
from experiments.harness import config as harness
from experiments.harness import plots, show, timing
from experiments.harness.result import Claim, Result, Rows
from experiments.parts import digits, lockstep
from jaxdp import algorithms
from jaxdp.program import ProgramReport, analyze

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DESIGNS = {
    "star": jaxdp.GatherToRoot(),
    "ring": jaxdp.RingAllReduce(),
    "native": jaxdp.NativeAllReduce(),
}
SCHEDULES = {"star": algorithms.star, "ring": algorithms.ring}
EARLY = 20  # steps in which designs must agree with one device ...
BOUND = 1e-5  # ... to this absolute difference of every parameter
WIDTHS = (10, 6, 3, 1.2)  # points, of lines that lie on top of each other


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    epochs: int = 15  # passes over the training images
    batch_size: int = 128  # rows over all devices
    learning_rate: float = 0.05
    momentum: float = 0.9
    seed: int = 0  # of parameters, split and batches
    repeats: int = timing.REPEATS  # timed steps of each design

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        self.check_divides(self.batch_size)
        if self.epochs < 1 or self.batch_size > digits.TRAIN_ROWS:
            raise ValueError(
                f"--epochs got {self.epochs} and --batch-size {self.batch_size}. "
                f"Training needs at least one step, and there are {digits.TRAIN_ROWS} "
                "training images. Use --epochs 15 --batch-size 128, for example."
            )


@harness.full_precision
def run(config: Config) -> Result:
    """Answers the question."""
    problem = digits.problem(config.seed, config.learning_rate, config.momentum)
    epochs = 1 if config.tiny else config.epochs
    data = [*digits.batches(problem.train, config.batch_size, epochs, config.seed)]
    trainers = make_trainers(problem, data[0], config.devices)
    with show.progress("training in lockstep", len(data)) as advance:
        history = lockstep.train(trainers, data, advance)
    accuracy = {name: problem.accuracy(t.params()) for name, t in trainers.items()}
    times = time_steps(trainers, data[0], 2 if config.tiny else config.repeats)
    return Result(
        claims=[claim_identical(history, config.devices)],
        tables={
            "runs": compare(trainers, accuracy, history),
            "step_times": times,
            "largest_parameter_difference_by_step": by_step(history),
        },
        figures={
            "Training loss": plot_losses(history),
            "Parameter difference to a single device": plot_differences(history),
        },
        programs={f"{name} step": t.program for name, t in trainers.items()},
    )


def make_trainers(
    problem: digits.Problem, batch: digits.Batch, count: int
) -> dict[str, lockstep.Trainer]:
    """The single-device run and the designs."""
    mesh = jaxdp.data_mesh(count)
    given = problem.loss_fn, problem.optimizer, problem.params, batch
    trainers = {lockstep.ALONE: lockstep.single(*given)}
    for name, design in DESIGNS.items():
        trainers[name] = lockstep.parallel(*given, mesh, design)
    return trainers


def time_steps(
    trainers: dict[str, lockstep.Trainer], batch: digits.Batch, repeats: int
) -> Rows:
    """Times further steps, in turns."""
    calls = {name: functools.partial(t.step, batch) for name, t in trainers.items()}
    with show.progress("timing steps", repeats) as advance:
        times = timing.interleaved(calls, repeats, advance)
    return [{"run": name} | time._asdict() for name, time in times.items()]


def compare(
    trainers: dict[str, lockstep.Trainer],
    accuracy: dict[str, float],
    history: lockstep.History,
) -> Rows:
    """What each run reached, and what its step sends."""
    rows = []
    for name, trainer in trainers.items():
        report = analyze(trainer.program)
        differences = history.differences.get(name, [0.0])
        rows.append(
            {
                "run": name,
                "test accuracy": accuracy[name],
                f"apart, first {EARLY} steps": max(differences[:EARLY]),
                "apart, last step": differences[-1],
                "rounds": rounds(name, report),
                "root_sends_bytes": report.sent_bytes[0],
                "others_send_bytes": report.sent_bytes[-1],
            }
        )
    return rows


def rounds(name: str, report: ProgramReport) -> int:
    """Rounds of a step: permutes by their schedule, and every all-reduce as one."""
    found = report.count("all-reduce")
    if name in SCHEDULES and report.devices > 1:
        schedule = SCHEDULES[name](report.devices)
        permutes = sum(len(round_.transfers) for round_ in schedule.rounds)
        found += report.permutes * len(schedule.rounds) // permutes
    return found


def by_step(history: lockstep.History) -> Rows:
    """The largest difference of any parameter to the single device's, step by step."""
    steps = zip(*history.differences.values(), strict=True)
    return [
        {"step": i, **dict(zip(history.differences, values, strict=True))}
        for i, values in enumerate(steps, start=1)
    ]


def plot_losses(history: lockstep.History) -> "Figure":
    """All runs on top of each other, the widest line at the bottom."""
    note = "runs lie on top of each other: later ones are drawn thinner"
    figure, axes = plots.plot("Training loss", "step", "loss", note)
    for width, (name, losses) in zip(WIDTHS, history.losses.items(), strict=True):
        style = {"color": plots.STYLES[name]["color"], "solid_capstyle": "round"}
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, label=name, linewidth=width, **style)
    axes.set_ylim(bottom=-0.08)  # room for the widest line at 0
    axes.legend(frameon=False)
    return figure


def plot_differences(history: lockstep.History) -> "Figure":
    """How far designs are from the single device, on a logarithmic scale."""
    title = "Parameter difference to a single device"
    figure, axes = plots.plot(title, "step", "largest absolute difference")
    for name, differences in history.differences.items():
        style = plots.STYLES[name] | {"marker": None}
        axes.plot(range(1, len(differences) + 1), differences, label=name, **style)
    style = {"color": plots.INK, "linewidth": 2, "label": f"bound, first {EARLY} steps"}
    axes.plot([1, EARLY], [BOUND, BOUND], **style)
    axes.set_yscale("log")
    axes.legend(frameon=False, loc="lower right")
    return figure


def claim_identical(history: lockstep.History, count: int) -> Claim:
    """CB7."""
    differing = sum(history.differing.values())
    compared = sum(history.compared.values())
    steps = len(history.losses[lockstep.ALONE])
    return Claim(
        id="CB7",
        claim="After an all-reduce and the same update, all replicas are identical",
        expected=0,
        measured=differing,
        unit=f"of {compared:,} copies with other bits than the first device's",
        verdict="refuted" if differing else "holds" if compared else "partly",
        why=f"Every parameter was compared bit by bit with device 0's, on all {count} "
        f"devices after each of {steps} steps, for {', '.join(DESIGNS)}. Between "
        "designs, and to a single device, parameters differ in the last bits, since "
        "sums are made in another order.",
    )
