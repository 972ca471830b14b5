"""Does training on rows that nothing divides equal one device, and what breaks it?

Command:   make experiment EXP=uneven         ARGS="--devices 8 --batch-size 64"
Hardware:  any; without GPUs, 8 forced host devices.
Runtime:   about 30 s on two cores.

Data sets of 1, 3, 66 and 1,797 digits train a small network with BatchNorm on N and
N / 2 devices, in batches of 64: all batches have one shape, and masked copies fill the
last one. At every step gradient, loss, accuracy and running averages are compared with
one device that has the real rows only and Flax's own BatchNorm. Then the same gradient
with a mask missing here or there, and metrics that count copies.

Expected numbers, for N = 8 and 4 devices:
  gradient difference    below 1e-6 for every data set, in every step
  compilations           1 for all data sets and epochs
  rows used an epoch     1, 3, 66 and 1,797: every row, once
  parameters afterwards  within 1e-6 of a run on one device
  a mask missing         0.5 to 300 % of the largest gradient entry off, or no number
  metrics of 66 rows     over 66; with copies counted over 128

Single precision sums the same numbers in another order, which is what is left.
"""

import dataclasses
from typing import Any

from experiments.harness import config as harness
from experiments.harness import show
from experiments.harness.result import Claim, Result, Rows
from experiments.parts import uneven_figures as figures
from experiments.parts import uneven_mistakes as mistakes
from experiments.parts import uneven_runs as runs

LENGTHS, TINY_LENGTHS = (1, 3, 66, 1797), (1, 3, 66)
BOUND = 1e-6  # of the gradient difference
EVALUATED = 66  # rows of the data set whose metrics are counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    batch_size: int = 64  # rows over all devices
    epochs: int = 2  # passes over each data set

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_divides(self.batch_size)
        if self.devices < 2 or self.epochs < 1:
            raise ValueError(
                f"--devices got {self.devices} and --epochs {self.epochs}. Rows are "
                "split over at least 2 devices, and training needs an epoch. Use "
                "--devices 8 --epochs 2, for example."
            )


@harness.full_precision
def run(config: Config) -> Result:
    """Answers the question."""
    size, devices = config.batch_size, config.devices
    lengths, ways = LENGTHS, mistakes.WAYS
    if config.tiny:
        lengths, ways = TINY_LENGTHS, (ways[0], ways[-1])
    counts = [devices // 2, devices]
    with show.progress("training", len(counts) * len(lengths)) as advance:
        found = [
            runs.train(lengths, count, size, config.epochs, advance) for count in counts
        ]
    rows = [row for each in found for row in each.rows]
    real = (size - 4, 5, 3)  # almost whole, the last of 1,797 by 64, the smallest
    with show.progress("leaving masks out", len(ways)) as advance:
        wrong = mistakes.gradients(ways, real, devices, size, advance)
    trained = found[-1].params, found[-1].model_state
    counted = mistakes.evaluation(*trained, EVALUATED, devices, size)
    titles = "Gradient difference to one device", "Gradients with padding left in"
    return Result(
        claims=[claim_round_down(rows, wrong, config)],
        tables={
            "uneven_data_sets": rows,
            "masks_left_out": wrong,
            f"metrics_of_{EVALUATED}_rows": counted,
        },
        figures={
            titles[0]: figures.by_length(titles[0], rows, BOUND),
            titles[1]: figures.of_mistakes(titles[1], wrong),
        },
        programs={f"step on {devices} devices": found[-1].step.compile()},
    )


def claim_round_down(rows: Rows, wrong: Rows, config: Config) -> Claim:
    """A7."""
    worst = max(row["gradient apart"] for row in rows)
    whole = all(row["rows used"] == row["rows"] for row in rows)
    once = all(row["compilations"] == 1 for row in rows)
    return Claim(
        id="A7",
        claim="The batch size must be rounded down to a multiple of the devices; what "
        "is left of the data is lost",
        expected="no gradient of an uneven batch",
        measured=worst,
        unit="largest gradient difference to one device, every row used",
        verdict="refuted" if worst <= BOUND and whole and once else "holds",
        why=f"Data sets of {listed(rows, 'rows')} rows were trained on "
        f"{listed(rows, 'devices')} devices, {config.batch_size} rows a step, the last "
        "batch filled with masked copies: every epoch used every row once, in one "
        "compiled program, and at every step the gradient was that of one device on "
        "the real rows, with BatchNorm over the whole batch. Without a mask in the "
        f"loss or in BatchNorm it was off by {off(wrong)} of its largest entry.",
    )


def listed(rows: Rows, column: str) -> str:
    """The different values of a column."""
    values = [f"{value:,}" for value in dict.fromkeys(row[column] for row in rows)]
    return f"{', '.join(values[:-1])} and {values[-1]}"


def off(wrong: Rows) -> str:
    """The range of the differences that a missing mask makes, in words."""
    values: list[Any] = [
        value
        for row in wrong
        if row["padding"] != mistakes.RIGHT
        for value in row.values()
        if isinstance(value, float) and value > BOUND  # rows may be even by chance
    ]
    return f"{min(values):.1%} to {max(values):.0%}"
