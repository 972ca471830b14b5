"""What does a device hold and send at each stage of ZeRO, and do all train the same?

Command:   make experiment EXP=zero            ARGS="--most 8 --models resnet"
Hardware:  any. Steps are compiled for H100 GPUs, which need not be there; where XLA's
           compiler for them is not installed, for the devices at hand, up to 4.
Runtime:   about half an hour on two cores, for 32 programs, half of it for N = 64.

Stage 0 is `RingAllReduce`; `Zero` cuts the optimizer state into N parts (stage 1),
gradients too (2), parameters too (3). Training steps of ResNet-50 (25,557,032
parameters) and GPT-2 small (124,439,808) with Adam in float32 are compiled at every
stage for N = 1, 2, 8 and 64. A device gets one image of 64 x 64 or one
sequence of 64 tokens, so that it holds little but parameters, gradients and optimizer
state. What it holds when it holds most is read from the program by kind, beside the
formulas of Rajbhandari et al., SC 2020, section 5, for p = g = 4 and k = 8 bytes; what
it sends is counted, beside those of section 7. Then a small CNN learns scikit-learn's
digits at every stage in lockstep, on forced host devices, and further steps are timed.

Expected numbers, by formula, for Ψ parameters and Φ = 4 Ψ bytes of gradients:
  stage           0          1               2               3
  holds           16 Ψ       (8 + 8/N) Ψ     (4 + 12/N) Ψ    16 Ψ / N
  ResNet, N = 8   390        219.4           134.1           48.7 MiB
  ResNet, N = 64  390        198.1           102.1           6.1 MiB
  counted, N = 8  402        223.8           127.1           41.8 MiB
  in all, N = 8   414        239             218             172 MiB
  sends           2 (N-1)/N Φ in stages 0, 1 and 2, and 3 (N-1)/N Φ in stage 3
  spared          biases and the like are gathered once per step, not twice
  losses          those of DDP, to rounding: 2.4e-7 apart at most

What is counted beside the formula in stages 2 and 3 does not shrink with N: gathered
parameters and gradients of two buckets of 25 MiB, and kernels of convolutions, in the
layout of the library, that wait for the backward pass. The formula counts all parts of
gradients, of which some do not exist yet when a device holds most.

Forced host devices share cores, so that step times are no measure of bandwidth.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from experiments.harness import config as harness
from experiments.harness import devices, show, timing
from experiments.harness.result import Result, Rows
from experiments.parts import digits, lockstep
from experiments.parts import zero_claims as claims
from experiments.parts import zero_figures as figures
from experiments.parts import zero_formulas as formulas
from experiments.parts import zero_steps as steps
from experiments.parts import zero_tables as tables
from experiments.parts import zero_training as training
from experiments.parts.zero_steps import Step
from jaxdp import targets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = (1, 2, 8, 64)  # devices of the programs
TINY = (2,)
SHOWN = 8  # devices of the programs that are written to files
BARS = (2, 8, 64)  # devices of steps that are drawn kind by kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 4  # that train the digits
    most: int = 64  # devices of the largest program, of 1, 2, 8 and 64
    least: int = 1  # of the smallest
    models: Literal["both", "resnet", "transformer"] = "both"
    epochs: int = 5  # passes over the digits
    repeats: int = timing.REPEATS  # timed steps of each stage

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        if self.most < 2 or self.epochs < 1 or training.BATCH_SIZE % self.devices:
            raise ValueError(
                f"--most got {self.most}, --epochs {self.epochs} and --devices "
                f"{self.devices}. Parts need programs for at least 2 devices, and "
                f"training at least 1 epoch, on a number of devices that divides the "
                f"batch of {training.BATCH_SIZE} rows. Use --most 64 --epochs 5 "
                "--devices 4, for example."
            )

        if self.least > self.most:
            raise ValueError(
                f"--least got {self.least} and --most {self.most}. The smallest "
                "program has no more devices than the largest: use --least 1 --most "
                "64, for example."
            )

    def numbers(self, most: int) -> list[int]:
        """Devices of the programs: one at least, whatever is asked for."""
        found = [n for n in COUNTS if n <= most]
        return [n for n in found if n >= self.least] or found[-1:]

    def where(self) -> str:
        """Says what programs are for, and what trains."""
        here = super().where()
        if self.tiny or targets.missing(steps.TARGET):
            return here
        return f"{devices.elsewhere('H100 GPUs')}; but training on {here}"


def run(config: Config) -> Result:
    """Answers the question."""
    target = None if config.tiny else devices.compiler(steps.TARGET)
    most = config.most if target else min(config.most, config.devices)
    numbers = TINY if config.tiny else config.numbers(most)
    where = f"for {'H100 GPUs' if target else 'the devices at hand'}"
    found = compiled(config, numbers, target)
    held, sent = tables.held(found, where), tables.sent(found, where)
    history, times, curves = train(config)
    return Result(
        claims=[claims.redundancy(held, sent, where)],
        tables={
            "held_by_a_device": held,
            "sent_by_a_device": sent,
            "losses_on_digits": curves,
            "step_times": times,
        },
        figures=draw(found, where)
        | {"Loss on digits": figures.losses("Loss on digits", history, curves)},
        programs={
            f"{step.model}, stage {step.stage}, N = {step.devices}": step.program
            for step in found
            if step.devices == max([n for n in numbers if n <= SHOWN] or numbers)
        },
    )


def compiled(config: Config, numbers: Sequence[int], target: str | None) -> list[Step]:
    """Every stage of every model, for all numbers of devices."""
    made = {"resnet": steps.resnet50, "transformer": steps.transformer}
    names = [*made] if config.models == "both" else [config.models]
    names = names[-1:] if config.tiny else names
    chosen = [made[name](config.tiny) for name in names]
    found = []
    label = f"compiling for up to {max(numbers)} devices"
    count = len(chosen) * len(numbers) * len(formulas.STAGES)
    with show.progress(label, count) as advance:
        for model in chosen:
            for n in numbers:
                for stage in formulas.STAGES:
                    found.append(steps.step(model, stage, n, target))
                    advance()
    return found


@harness.full_precision
def train(config: Config) -> tuple[lockstep.History, Rows, Rows]:
    """Losses of every stage, step times, and how far losses are apart."""
    given = training.problem()
    data = training.data(given, 1 if config.tiny else config.epochs)
    data = data[:3] if config.tiny else data
    trainers = training.trainers(given, data[0], config.devices)
    with show.progress("training in lockstep", len(data)) as advance:
        history = lockstep.train(trainers, data, advance)
    del trainers[lockstep.ALONE]
    times = time_steps(trainers, data[0], 2 if config.tiny else config.repeats)
    return history, times, training.curves(history)


def time_steps(
    trainers: dict[str, lockstep.Trainer], batch: digits.Batch, repeats: int
) -> Rows:
    """Times further steps, in turns."""
    calls = {name: functools.partial(t.step, batch) for name, t in trainers.items()}
    with show.progress("timing steps", repeats) as advance:
        times = timing.interleaved(calls, repeats, advance)
    base = times[training.DDP].median_ms
    return [
        {"run": name, "of DDP's": time.median_ms / base} | time._asdict()
        for name, time in times.items()
    ]


def draw(found: list[Step], where: str) -> "dict[str, Figure]":
    """For each model: what a device holds by kind, and against several N."""
    drawn = {}
    for model in dict.fromkeys(step.model for step in found):
        own = [step for step in found if step.model == model]
        title = f"Memory of {model} by stage"
        shown = [step for step in own if step.devices in BARS]
        drawn[title] = figures.bars(title, shown, f"compiled {where}")
        if len({step.devices for step in own}) > 1:
            title = f"Memory of {model} against N"
            drawn[title] = figures.against_n(title, own, f"compiled {where}")
    return drawn
