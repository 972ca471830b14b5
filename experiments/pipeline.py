"""What do micro-batches and re-materialization do for a pipeline of stages?

Command:   make experiment EXP=pipeline        ARGS="--stages 4 --rows 512"
Hardware:  any; without GPUs, 8 forced host devices. Where XLA's compiler for H100 GPUs
           is installed, larger pipelines are compiled for 8 of them.
Runtime:   about a minute on two cores, for 24 programs.

GPipe (Huang et al., NeurIPS 2019): layers are split into P stages on P devices, rows
into M micro-batches, which follow each other through the stages. A residual block
normalises 64 numbers and sends them through 256 others; 16 blocks, in 4 stages, read
scikit-learn's digits. Both passes are one compiled program. Micro-batches carry
numbers, so that it counts who worked in which tick as it runs.

Expected numbers, for P stages and M micro-batches:
  bubble           (P-1)/(M+P-1) of all ticks, forward as backward; P = 4:
                   75, 60, 43, 27, 16 and 8.6 % at M = 1, 2, 4, 8, 16 and 32
  gradients        those of one device, to rounding: 3e-7 of the largest apart
  work             1.29 times as much re-materialized: 4/3, less a product in a stage
                                   M = 1    M = 4    M = 32
  memory           all kept          20.5      8.6      5.4 MiB of temporaries
                   re-materialized    6.6      2.1      0.9
                                   M = 1    M = 8    M = 32
  on 8 x H100      all kept           486      123       98 ms, predicted, for both
                   re-materialized    571      147      124
                   all kept          21.3      5.3      3.7 GiB of temporaries
                   re-materialized    5.0      1.1      0.7

On H100 GPUs 8 stages have 2 blocks of 4,096 and 16,384 numbers each, 2.1e9 parameters
in bfloat16, for 16,384 rows. From M = 8 to 32 the bubble falls from 47 to 18 %, and
time by less: every tick reads all matrices and adds to all gradients, for fewer rows.
What is kept falls with M, since one program for all stages has room for every tick,
also for one without a micro-batch: for (M+P-1)/M of the rows.

A stage without a micro-batch computes all the same, so that on forced host devices,
which share cores, a bubble takes time too: passes get faster with M, up to M = 16.
Beyond that, micro-batches are too small. These times are no measure of bandwidth.
"""

import dataclasses
import functools

from experiments.harness import config as harness
from experiments.harness import devices, show, timing
from experiments.harness.result import Result, Rows
from experiments.parts import pipeline_claims as claims
from experiments.parts import pipeline_figures as figures
from experiments.parts import pipeline_h100 as h100
from experiments.parts import pipeline_runs as runs
from experiments.parts import pipeline_tables as tables
from experiments.parts.pipeline_program import Stack
from experiments.parts.pipeline_runs import Run

MICROBATCHES = (1, 2, 4, 8, 16, 32)
FEWER = (1, 4, 16)  # of other numbers of stages
OTHERS = (2, 8)  # stages, of smaller blocks that are counted alone
DRAWN = (1, 4, 8)  # micro-batches of pipelines that are drawn tick by tick
ALL_DIGITS = 1797
REPEATS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    stages: int = 4  # of the pipeline that is looked at closely
    rows: int = 512  # of digits, in all micro-batches
    repeats: int = REPEATS  # timed passes of each program

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        if not 2 <= self.stages <= self.devices:
            raise ValueError(
                f"--stages got {self.stages} for {self.devices} devices. A pipeline "
                "has at least 2 stages, each on a device of its own. Use --stages 4 "
                "--devices 8, for example."
            )
        most = max(MICROBATCHES)
        if self.rows % most or not most <= self.rows <= ALL_DIGITS:
            raise ValueError(
                f"--rows got {self.rows}. They are split into up to {most} "
                f"micro-batches of equally many, and there are {ALL_DIGITS:,} digits. "
                f"Use a multiple of {most}, such as --rows 512."
            )


def run(config: Config) -> Result:
    """Answers the question."""
    stack = Stack(stages=config.stages, blocks=1 if config.tiny else 4)
    ran, others = executed(config, stack)
    kept = [one for one in ran if not one.remat]
    bubbles = tables.bubbles([*kept, *others])
    held, work = tables.memory(ran, stack.width), tables.work(ran, stack)
    agreed = agreement(ran, stack, config.rows)
    drawn = [one for one in kept if one.microbatches in DRAWN]
    return Result(
        claims=[claims.pipeline(bubbles, held, agreed, work, config.stages)],
        tables={
            "bubble": bubbles,
            "memory_of_a_device": held,
            "agreement": agreed,
            "times_of_both_passes": times(ran, 2 if config.tiny else config.repeats),
        }
        | ({"work": work} if work else {})
        | predicted(config),
        figures={
            "Who works when": figures.gantt("Who works when", drawn),
            "Bubble": figures.bubbles("Bubble", bubbles),
            "Memory": figures.memory("Memory of a device", held, config.stages),
        },
        programs={
            f"Pipeline, {one.name}": one.program
            for one in ran
            if one.microbatches == DRAWN[1]
        },
    )


@harness.full_precision
def executed(config: Config, stack: Stack) -> tuple[list[Run], list[Run]]:
    """Pipelines that ran: those of the model, and small ones of other stages."""
    numbers = DRAWN[:2] if config.tiny else MICROBATCHES
    wanted = [(stack, m, remat) for m in numbers for remat in (False, True)]
    small = [
        (Stack(stages=stages, blocks=1, hidden=8), m, False)
        for stages in (() if config.tiny else OTHERS)
        for m in FEWER
        if stages <= config.devices and stages != config.stages
    ]
    found = []
    with show.progress("running pipelines", len(wanted) + len(small)) as advance:
        for one in [*wanted, *small]:
            found.append(runs.run(*one, config.rows))
            advance()
    return found[: len(wanted)], found[len(wanted) :]


@harness.full_precision
def agreement(ran: list[Run], stack: Stack, rows: int) -> Rows:
    """Loss and gradients beside those of the same blocks on one device."""
    return tables.agreement(ran, *runs.alone(stack, rows))


def times(ran: list[Run], repeats: int) -> Rows:
    """Times both passes of all pipelines, in turns."""
    calls = {one.name: functools.partial(one.program, *one.given) for one in ran}
    with show.progress("timing passes", repeats) as advance:
        found = timing.interleaved(calls, repeats, advance)
    base = next(iter(found.values())).median_ms
    return [
        {"run": name, "of M = 1": time.median_ms / base} | time._asdict()
        for name, time in found.items()
    ]


def predicted(config: Config) -> dict[str, Rows]:
    """Pipelines on H100 GPUs, where their compiler is installed."""
    if config.tiny or not devices.compiler(h100.TARGET):
        return {}
    if config.devices < h100.STACK.stages:
        return {}
    wanted = [(m, remat) for m in h100.MICROBATCHES for remat in (False, True)]
    rows = []
    with show.progress("compiling for H100", len(wanted)) as advance:
        for microbatches, remat in wanted:
            rows.append(h100.row(h100.STACK, microbatches, remat, h100.ROWS))
            advance()
    return {"predicted_on_8_h100": rows}
