"""What does every design send, per device and per link, and is it what formulas say?

Command:   make experiment EXP=traffic         ARGS="--most 16"
Hardware:  any. Steps are compiled for H100 GPUs, which need not be there; where XLA's
           compiler for them is not installed, for the devices at hand, up to 8.
Runtime:   about 4 min on two cores; half of it are two programs for 64 devices.

One training step of a linear layer, with every design, compiled for N = 1, 2, 3, 4, 8,
16 and 64 devices. Bytes sent by each device and over each link are counted in the
program and compared with a closed form in N and Φ, the bytes of the gradient: as whole
numbers, so that they are equal or not. Closed forms say how much of it is gradients,
what rides beside them (a loss of 4 bytes, a parameter server's weights and flags,
scales of 8-bit integers) and padding to whole chunks. Of one gradient N divides
nothing, of the other every leaf. `jaxdp.DataParallel` is no single program: its
transfers are read from the trace of a step on the devices at hand.

Expected numbers, for Φ bytes of gradients, by closed form:
  ring, native, local SGD     2(N-1)Φ/N sent per device, and over each link of the ring
  gather to root, 1 server    (N-1)Φ in and (N-1)Φ out of one device, Φ over each link
  4 servers that work         (N+2)Φ/4 each, and (N-1)Φ/4 of it for what they serve
  2 dedicated servers         (N-1)Φ/2 each
  recursive doubling          log2(N)Φ per device, in as many rounds
  bf16, int8                  a half and a quarter of a ring: parts go to their owners
  all links together          2(N-1)Φ for rings, stars and servers; N log2(N)Φ for
                              recursive doubling
  time, one server / ring     62 at N = 64 for ResNet-50 on 10 Gbit/s: predicted

Rounds on the critical path are counted too: 2(N-1) in a ring, 2 through servers. With
compressed gradients XLA sums the loss in the kernel that updates parameters, so that
the ring of the loss waits: N + 2(N-1) rounds up to N = 16, where it need not.

XLA's own all-reduce leaves links to the runtime: it is counted as the ring that NCCL
makes. Times are predicted by the cost of the schedules; nothing is timed here.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.harness import config as harness
from experiments.harness import devices, show
from experiments.harness.result import Result, Rows
from experiments.parts import traffic_claims as claims
from experiments.parts import traffic_counts as counts
from experiments.parts import traffic_designs as designs
from experiments.parts import traffic_figures as figures
from experiments.parts import traffic_port as port
from experiments.parts import traffic_tables as tables
from experiments.parts import traffic_times as times
from experiments.parts.traffic_counts import TARGET, Counted
from jaxdp import targets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = (1, 2, 3, 4, 8, 16, 64)  # devices of the programs
FEWEST = 4  # with which every design exists
TINY = (1, 4)
LARGE = 64  # from here on, what is slow to compile is compiled for one gradient only
Found = dict[tuple[str, str, int], Counted]  # by design, gradient and N


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    most: int = 64  # devices of the largest program, of 1, 2, 3, 4, 8, 16, 64

    def where(self) -> str:
        """Says what programs are for."""
        if targets.missing(TARGET):
            return super().where()
        return devices.elsewhere("H100 GPUs")

    def check(self) -> None:
        """Checks the options."""
        super().check()
        if min(self.devices, self.most) < FEWEST:
            raise ValueError(
                f"--devices got {self.devices} and --most {self.most}. Designs with "
                f"{designs.SERVERS} servers need at least {FEWEST} devices, at hand "
                "and in programs. Use --devices 8 --most 64, for example."
            )


def run(config: Config) -> Result:
    """Answers the question."""
    target = devices.compiler(TARGET)
    gradients = [*counts.GRADIENTS][: 1 if config.tiny else None]
    most = config.most if target else min(config.most, config.devices)
    numbers = [n for n in COUNTS if n <= most]
    used = [n for n in numbers if n in TINY] if config.tiny else numbers
    found = in_programs(used, gradients, target)
    found |= in_traces([n for n in used if n <= config.devices], gradients)
    keys = [key for name in ways(gradients[0]) for key in found if key[0] == name]
    rows = [counts.row(ways(key[1])[key[0]], *key[1:], found[key]) for key in keys]
    predicted = times.rows(numbers)
    where = f"compiled for {'H100 GPUs' if target else devices.describe(most)}"
    return Result(
        claims=[
            claims.ring(rows, where),
            claims.server(rows, predicted, where),
            claims.shares(rows, where),
        ],
        tables={
            "designs": tables.summary(rows, where),
            **{
                name: tables.columns(rows, columns, where)
                for name, columns in tables.COUNTED.items()
            },
            "predicted_times": predicted,
        },
        figures=draw(found, rows, gradients[0], where),
        programs={
            f"{name} on {FEWEST} devices": counts.compiled(
                name, gradients[0], FEWEST, target
            )
            for name in designs.WAYS
        },
    )


def ways(gradient: str) -> dict[str, designs.Way]:
    """All designs, and `DataParallel`."""
    return {**designs.WAYS, designs.PORT: port.way(gradient)}


def in_programs(
    numbers: Sequence[int], gradients: Sequence[str], target: str | None
) -> Found:
    """Counts every design in compiled programs."""
    keys = [
        (way.name, gradient, n)
        for n in numbers
        for gradient in gradients
        for way in designs.WAYS.values()
        if n >= way.least and (n < LARGE or gradient == gradients[0] or not way.slow)
    ]
    found = {}
    with show.progress("counting bytes in programs", len(keys)) as advance:
        for key in keys:
            found[key] = counts.in_program(*key, target)
            advance()
    return found


def in_traces(numbers: Sequence[int], gradients: Sequence[str]) -> Found:
    """Counts `DataParallel` in traces."""
    keys = [(gradient, n) for n in numbers for gradient in gradients]
    return {(designs.PORT, *key): port.count(*key) for key in keys}


def draw(found: Found, rows: Rows, gradient: str, where: str) -> dict[str, "Figure"]:
    """Both figures, of one gradient."""
    last = max(n for _, _, n in found if n <= tables.MAPPED)
    by_link = {
        name: found[name, gradient, last]
        for name in designs.WAYS
        if (name, gradient, last) in found
    }
    chosen = [row for row in rows if row["chunks"] == gradient]
    titles = "Bytes of the busiest device", f"Bytes by link on {last} devices"
    return {
        titles[0]: figures.busiest(titles[0], ways(gradient), chosen, where),
        titles[1]: figures.links(titles[1], by_link, counts.phi(gradient)),
    }
