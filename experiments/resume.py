"""Does a run go on from a checkpoint on any design, device count, and after damage?

Command:   make experiment EXP=resume          ARGS="--size-mb 256"
Hardware:  any; without GPUs, 8 forced host devices. Rates are those of the disk that
           holds the temporary folder.
Runtime:   about 2 minutes on two cores, of which half for the rates.

A small network learns the digits with Adam under a ring on all devices, and a
checkpoint is saved on the way. It is restored onto every design and on fewer devices,
and each goes on with the same batches; one way leads through ZeRO stage 3 and back.
Then every file of a checkpoint is damaged, and what restore does is written down. Last,
a large state is saved and restored beside a plain file of the same size.

Expected numbers:
  same design and devices  the same losses, bit for bit
  others                   the first loss within rounding, a few 10^-7 of it
  LocalSGD                 the first loss alike; then it trains differently
  damage                   always found: the checkpoint before is used
  rates                    save and restore together take at most twice as long as the
                           disk alone
  blocked                  the loop waits less than a tenth of the time of a save
"""

import dataclasses
import pathlib
import tempfile

from experiments.harness import config as harness
from experiments.harness import show
from experiments.harness.result import Result, Rows
from experiments.parts import resume_damage as damage
from experiments.parts import resume_figures as figures
from experiments.parts import resume_rates as rates
from experiments.parts import resume_runs as runs

LOSSES, TIMES = (
    "Losses before and after a checkpoint",
    "Seconds for the disk and for us",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    steps: int = 60  # of each run
    saved_at: int = 20  # steps, of which the checkpoint is
    batch_size: int = 96  # rows of a step, over all devices
    size_mb: float = 1000.0  # MB of the state whose rates are measured
    repeats: int = 3  # of the rates

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_divides(self.batch_size)
        if self.devices < 2 or not 2 <= self.saved_at < self.steps - 1:
            raise ValueError(
                f"--devices got {self.devices}, --saved-at {self.saved_at} and --steps "
                f"{self.steps}. It takes 2 devices, 2 steps before the checkpoint and "
                "2 after it. Use --devices 8 --saved-at 20 --steps 60, for example."
            )
        if self.size_mb < 1 or self.repeats < 1:
            raise ValueError(
                f"--size-mb got {self.size_mb} and --repeats {self.repeats}. A state "
                "has at least 1 MB, and is saved at least once. Use --size-mb 1000 "
                "--repeats 3, for example."
            )

    @property
    def sizes(self) -> "Config":
        """What is run: itself, or the smallest."""
        if not self.tiny:
            return self
        return dataclasses.replace(self, steps=6, saved_at=3, size_mb=3.0, repeats=1)


def run(config: Config) -> Result:
    """Answers the question."""
    sizes = config.sizes
    with tempfile.TemporaryDirectory(prefix="jaxdp-resume-") as name:
        folder = pathlib.Path(name)
        never, resumed = resume(sizes, folder)
        damages = damage.table(folder / "run", runs.training("ring", sizes.devices))
        speed, waited = measure(sizes, folder / "rates")
    note = (
        f"Adam on digits, a batch of {sizes.batch_size}, saved after {sizes.saved_at}"
    )
    return Result(
        claims=[],
        tables={
            "resumed": [run.row(never) for run in resumed],
            "damage": damages,
            "rates": speed,
            "blocked": waited,
        },
        figures={
            LOSSES: figures.losses(LOSSES, note, never, resumed, sizes.saved_at),
            TIMES: figures.times(TIMES, speed),
        },
    )


def resume(config: Config, folder: pathlib.Path) -> tuple[runs.Run, list[runs.Run]]:
    """The run that never stopped, and those that go on from its checkpoint."""
    plan = runs.plan(config.devices, config.tiny)
    sizes = runs.Sizes(config.steps, config.saved_at, config.batch_size)
    with show.progress("training and restoring", len(plan) + 2) as advance:
        never = runs.whole(folder / "run", config.devices, sizes)
        advance()
        resumed = []
        for design, devices in plan:
            resumed.append(runs.resumed(folder / "run", design, devices, sizes))
            advance()
        back = runs.there_and_back(folder, config.devices, sizes)
        advance()
    return never, [*resumed, back]


def measure(config: Config, folder: pathlib.Path) -> tuple[Rows, Rows]:
    """Rates of saving and restoring, and how long the loop waits."""
    with show.progress("saving and restoring", config.repeats) as advance:
        measured = rates.measure(folder, config.size_mb, config.repeats, advance)
    return rates.speed(measured), rates.blocked(measured)
