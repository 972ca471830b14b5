"""Which all-reduce is quickest, for how many bytes, on how many devices of what kind?

Command:   make experiment EXP=algorithms      ARGS="--size-mb 64"
Hardware:  any; without GPUs, 8 forced host devices.
Runtime:   about 3 min on two cores, nearly all of it timing.

Expected numbers: to be written.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.harness import config as harness
from experiments.harness import timing
from experiments.harness.result import Result, Rows
from experiments.parts import algorithms_claims as claims
from experiments.parts import algorithms_figures as figures
from experiments.parts import algorithms_hardware as hardware
from experiments.parts import algorithms_prices as prices
from experiments.parts import algorithms_times as times
from jaxdp.targets import Hardware

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # devices that are priced
COUNTED = (8, 64, 2, 3, 4, 16)  # devices whose bytes are counted
TINY = (2, 6, 8)
TIMED = (2, 4, 8)  # devices that are timed
DRAWN = (8, 64)  # devices whose times are drawn
SMALLEST_MB = 0.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    size_mb: float = 16.0  # MiB of the largest buffer that is timed
    repeats: int = timing.REPEATS  # timed calls of each algorithm and size

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        if self.devices < 2:
            raise ValueError(
                f"--devices got {self.devices}. An all-reduce of one device sends "
                "nothing, so that there is nothing to choose: use --devices 2 or more."
            )
        if not SMALLEST_MB <= self.size_mb < math.inf:
            raise ValueError(
                f"--size-mb got {self.size_mb}. Buffers from 1 KiB up to it are timed, "
                f"so that it must be at least {SMALLEST_MB:g} MiB. Use --size-mb 16, "
                "for example."
            )


def run(config: Config) -> Result:
    """Answers the question."""
    machines = hardware.machines()
    counts = TINY if config.tiny else COUNTS
    sizes = prices.SIZES[:: 5 if config.tiny else 1]
    moved = prices.moved([n for n in COUNTED if n <= max(counts)])
    predicted = prices.predicted(machines, counts, sizes)
    timed = time_all(config)
    return Result(
        claims=[claims.ring(moved), claims.root(moved, predicted)],
        tables={
            "chosen": prices.chosen(machines, counts),
            "where_the_choice_changes": prices.changes(machines, counts),
            "moved": moved,
            "hardware": hardware.rows(),
            "chosen_on_the_devices_at_hand": times.agreement(timed),
            "measured": timed,
            "predicted": predicted,
        },
        figures=draw(machines, counts, timed),
    )


def time_all(config: Config) -> Rows:
    """Times on the devices at hand, from 1 KiB to the largest buffer."""
    counts = [n for n in TIMED if n < config.devices]
    counts = [config.devices] if config.tiny else [*counts, config.devices]
    largest = int(config.size_mb * 2**20)
    sizes = [size for size in prices.SIZES if size < largest] + [largest]
    if config.tiny:
        return times.measured(counts, [2**10, 2**14], repeats=2)
    return times.measured(counts, sizes, config.repeats)


def draw(
    machines: Mapping[str, Hardware], counts: Sequence[int], timed: Rows
) -> dict[str, "Figure"]:
    """What is chosen, and times in those of the ring."""
    title = "Which all-reduce is chosen"
    found = {title: figures.chosen(title, machines, counts)}
    for devices in DRAWN:
        if devices <= max(counts):
            title = f"Predicted times on {devices} devices"
            found[title] = figures.against_ring(title, machines, devices)
    title = "Measured in one process"
    return found | {title: figures.measured(title, timed)}
