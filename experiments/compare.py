"""Do all designs train the same network, and what does the step of each cost?

Command:   make experiment EXP=compare         ARGS="--devices 4 --epochs 20"
Hardware:  any; without GPUs, 8 forced host devices.
Runtime:   about a minute on two cores, most of it compilation.

A small CNN (38,282 parameters, Φ = 153,128 bytes) learns scikit-learn's digits: 1,437
images of 8 x 8 for training, 360 for the test, SGD with momentum. A plain single-device
run and eleven designs start from the same parameters and see the same batches; their
programs differ only in how gradients travel, and in what devices keep.

Expected numbers, for N = 8 devices, from the compiled programs:
                    busiest sends   all send   rounds   kept between steps
  gather to root    7 Φ             14 Φ       2        2 Φ, momentum included
  1 server          7 Φ             14 Φ       2        2 Φ
  8 servers         1.75 Φ          14 Φ       2        1.13 Φ
  ring              1.75 Φ          14 Φ       14       2 Φ
  doubling          3 Φ             24 Φ       3        2 Φ
  halving-doubling  1.75 Φ          14 Φ       6        2 Φ
  native            1.75 Φ          14 Φ       14       2 Φ, as the ring that NCCL makes
  local SGD         1.75 Φ          14 Φ       14       2 Φ, in one step of 8
  Zero(1), Zero(2)  1.75 Φ          14 Φ       14       1.13 Φ
  Zero(3)           2.62 Φ          21 Φ       21       0.25 Φ
  difference to the single device   below 1e-5 in each of the first 20 steps
  copies of the parameters          bit-identical on all devices after every step
  test accuracy                     above 0.95 for every design

Local SGD is another algorithm: replicas train alone and average their parameters in
every eighth step. Its copies are compared then, and it is not held to a difference.

Why the others drift apart at all: float32 addition is not associative. The gradient of
128 rows is summed in another order by every design, so its last bits differ; the next
step starts from parameters that differ by that much, and training amplifies it. Within
one run nothing drifts: all devices apply the same bits.
"""

import dataclasses
import functools

import jax

import jaxdp
from experiments.harness import config as harness
from experiments.harness import show, timing
from experiments.harness.result import Claim, Result, Rows
from experiments.harness.timing import Timing
from experiments.ledger import catalogue
from experiments.parts import compare_designs as designs
from experiments.parts import compare_figures as figures
from experiments.parts import digits, lockstep

EARLY = figures.EARLY


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
    trainers = make_trainers(problem, data[0], config.devices, config.tiny)
    with show.progress("training in lockstep", len(data)) as advance:
        history = lockstep.train(trainers, data, advance)
    accuracy = {name: problem.accuracy(t.params()) for name, t in trainers.items()}
    times = time_steps(trainers, data[0], 2 if config.tiny else config.repeats)
    phi = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.params))
    costs = designs.costs(trainers, times, phi)
    titles = "What the step of each design costs", "Training loss"
    apart = "Parameter difference to a single device"
    return Result(
        claims=[claim_identical(history, config.devices)],
        tables={
            **costs,
            "runs": compare(accuracy, history),
            "step_times": [{"run": n} | time._asdict() for n, time in times.items()],
            "largest_parameter_difference_by_step": by_step(history),
        },
        figures={
            titles[0]: figures.costs(titles[0], costs["designs"]),
            titles[1]: figures.losses(titles[1], history),
            apart: figures.differences(apart, history),
        },
        programs={f"{name} step": t.program for name, t in trainers.items()},
    )


def make_trainers(
    problem: digits.Problem, batch: digits.Batch, count: int, tiny: bool
) -> dict[str, lockstep.Trainer]:
    """The single-device run and the designs."""
    mesh = jaxdp.data_mesh(count)
    given = problem.loss_fn, problem.optimizer, problem.params, batch
    trainers = {lockstep.ALONE: lockstep.single(*given)}
    chosen = designs.designs(count, tiny)
    with show.progress("compiling", len(chosen)) as advance:
        for name, design in chosen.items():
            trainers[name] = lockstep.parallel(*given, mesh, design)
            advance()
    return trainers


def time_steps(
    trainers: dict[str, lockstep.Trainer], batch: digits.Batch, repeats: int
) -> dict[str, Timing]:
    """Times further steps, in turns."""
    calls = {name: functools.partial(t.step, batch) for name, t in trainers.items()}
    with show.progress("timing steps", repeats) as advance:
        return timing.interleaved(calls, repeats, advance)


def compare(accuracy: dict[str, float], history: lockstep.History) -> Rows:
    """What each run reached, and how far it is from the single device."""
    rows = []
    for name in accuracy:
        differences = history.differences.get(name, [0.0])
        rows.append(
            {
                "run": name,
                "test accuracy": accuracy[name],
                "last loss": history.losses[name][-1],
                f"apart, first {EARLY} steps": max(differences[:EARLY]),
                "apart, last step": differences[-1],
                "copies compared": history.compared[name],
                "of them other bits": history.differing[name],
            }
        )
    return rows


def by_step(history: lockstep.History) -> Rows:
    """The largest difference of any parameter to the single device's, for a few."""
    names = designs.TINY
    steps = zip(*(history.differences[name] for name in names), strict=True)
    return [
        {"step": i, **dict(zip(names, values, strict=True))}
        for i, values in enumerate(steps, start=1)
    ]


def claim_identical(history: lockstep.History, count: int) -> Claim:
    """CB7."""
    differing = sum(history.differing.values())
    compared = sum(history.compared.values())
    steps = len(history.losses[lockstep.ALONE])
    return Claim(
        id="CB7",
        claim=catalogue.text("CB7"),
        expected=0,
        measured=differing,
        unit=f"of {compared:,} copies with other bits than the first device's",
        verdict="refuted" if differing else "holds" if compared else "partly",
        why=f"Every parameter was compared bit by bit with device 0's, on all {count} "
        f"devices after each of {steps} steps, for {', '.join(history.differences)}: "
        "in stage 3 of ZeRO as gathered, for local SGD whenever it averages. Between "
        "designs, and to a single device, parameters differ in the last bits, since "
        "sums are made in another order.",
    )
