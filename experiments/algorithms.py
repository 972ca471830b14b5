"""Which all-reduce is quickest, for how many bytes, on how many devices of what kind?

Command:   make experiment EXP=algorithms      ARGS="--size-mb 4 --repeats 10"
Hardware:  any; without GPUs, 8 forced host devices.
Runtime:   6 to 7 min on two cores that had other work too; most of it is timing.

All algorithms are counted and priced by their schedules, for 2 to 64 devices and 1 KiB
to 1 GiB, on four kinds of hardware: H100 in one NVLink domain, H100 in hosts of 8 that
InfiniBand joins, V100 on PCIe in hosts of 8 that share an Ethernet adapter of 10
Gbit/s, and devices that each have one. Where the choice of `jaxdp.choose_algorithm`
changes is found by bisection. Beside that all of them are timed in one process, which
says nothing about links, but whether the choice is right there.

Expected numbers, for N devices and K bytes:
  sent by the busiest  2(N-1)K/N by rings, direct and, if N is a power of two,
                       halving-doubling; none sends less. (N-1)K by a star's root
  small buffers        recursive doubling: on 8 H100 up to 10.3 MiB, on Ethernet up to
                       147 KiB; on 12 and more V100, which share adapters, to 16 KiB
  large ones           the ring from 379 MiB on with 8 H100, from 5.25 MiB on Ethernet;
                       sooner if N is no power of two: from 9.8 MiB with 6 H100
  between them         halving-doubling: a ring's bytes in 2 log2 N rounds
  between hosts        halving-doubling, or hierarchical if their number is no power of
                       two: 24 and 48 devices
  never                trees and stars: one device has more messages or more bytes
  star / ring          64 at N = 64 for 1 GiB on Ethernet: predicted
  measured             on a busy machine with two cores: what is chosen takes at most
                       5 % longer than the quickest in 20 of 24 cases, and 61 % at
                       worst; a ring 4.8 times as long, for 4 KiB on 8 devices

What is modelled: a latency and a rate of each link, messages of one device one after
the other, adapters that hosts share. What is not: switches and tori, in which messages
meet, messages that travel at once, additions. Latencies are assumptions (`links.toml`),
and the sizes at which the choice changes are proportional to them.
"""

import dataclasses
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
        self.check_size_mb(self.size_mb, SMALLEST_MB, "the smallest has 1 KiB")


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
