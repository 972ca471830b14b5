"""Is a ring N times faster than a server, and what hides it, on links of limited rate?

Command:   make experiment EXP=bandwidth   ARGS="--hosts 4 --rate 400mbit --size-mb 16"
Hardware:  Linux, root, iproute2; two cores or more. No GPU.
Runtime:   about 25 minutes on two cores; --no-training and --most-hosts 4 shorten it.

Hosts are network namespaces of this machine, joined by a bridge, each link limited to
the rate in both directions. On each runs one process of JAX, and beside it one of
PyTorch. All ways to sum a buffer take their turns in the same run: our schedules, as
the executor runs them, `lax.psum`, and `torch.distributed.all_reduce`, both over gloo.
Beside each time stands its bound: what the busiest link has to carry over what it can
carry. Then hosts train a network of 16 MiB, with a batch that makes computation about
as long as communication. Processes share cores, so computation and communication
disturb each other as they would not on hosts of their own.

Expected numbers, for N hosts, Φ bytes and links of B bytes a second:
  headers         1,448 of the 1,514 bytes of a packet are payload: nothing comes below
                  1.046 times its bound, and a bare permute shows it
  ring            2 (N - 1) / N Φ / B: 503 ms for 4 hosts, 16 MiB and 400 Mbit/s
  one server      2 (N - 1) Φ / B: N times that; S servers 1 / S of it
  psum, PyTorch   the ring's bound, since no all-reduce can send less
  two hosts       a ring and recursive doubling take twice their bound: gloo sends
                  before it offers its peer a place to receive, so that the offer waits
                  behind the data and the two directions of a link take turns; `psum`
                  offers first, and `algorithm="auto"` takes that. For any N, hosts that
                  swap buffers take turns so: all of recursive doubling, some of the
                  transfers of N servers.
  GatherToRoot    a step is the sum of computation and 2 (N - 1) Φ / B
  delay of 1      a step is the longer of computation and communication
  in segments     hides more than half of the shorter one, as DDP does
"""

import dataclasses
import os
from typing import TYPE_CHECKING

from experiments import network
from experiments.harness import config as harness
from experiments.harness import show
from experiments.harness.result import Result, Rows
from experiments.parts import bandwidth_claims as claims
from experiments.parts import bandwidth_figures as figures
from experiments.parts import bandwidth_turns as turns
from experiments.parts import bandwidth_ways as ways
from experiments.parts.bandwidth_groups import Groups
from experiments.parts.bandwidth_mlp import Sizes
from experiments.parts.bandwidth_training import (
    DELAYED,
    DESIGNS,
    RING,
    Training,
    measure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The network, MiB of a bucket, and our designs. Rows are chosen unless it is tiny.
TRAINING = (Sizes(layers=16, width=512, rows=0), 2.0, DESIGNS)  # 16 MiB
TINY_TRAINING = (Sizes(layers=4, width=128, rows=64), 0.125, (RING, DELAYED))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 1  # of this process, which only asks the hosts
    hosts: int = 4  # that sum and train; each has one process and one link
    most_hosts: int = 8  # of time against N
    rate: str = "400mbit"  # of a link in each direction, as tc writes it
    mtu: int = 1500  # bytes of a packet
    size_mb: float = 16.0  # Φ; four times that is measured, too
    repeats: int = 10  # blocks of each way
    training: bool = True  # whether steps are timed, too

    def check(self) -> None:
        """Checks the options, and that hosts can be built here."""
        super().check()
        self.check_repeats(self.repeats)
        network.bytes_per_s(self.rate)
        if not 2 <= self.hosts <= 16 or self.most_hosts > 16:
            raise ValueError(
                f"--hosts got {self.hosts} and --most-hosts {self.most_hosts}. An "
                "all-reduce takes 2 hosts or more, and a machine has room for 16 pairs "
                "of processes at most. Use --hosts 4 --most-hosts 8."
            )
        if not 0.25 <= self.size_mb <= 256 or self.mtu < 576:
            raise ValueError(
                f"--size-mb got {self.size_mb} and --mtu {self.mtu}. Below 0.25 MiB a "
                "link carries from its bucket what no rate limits, 4 x 256 MiB fill "
                "the memory of a host, and IPv4 packets have 576 bytes or more. Use "
                "--size-mb 16 --mtu 1500."
            )
        absent = network.missing()
        if absent:
            raise ValueError(absent)

    def scaled(self) -> "Config":
        """With the smallest sizes, if it is tiny."""
        small = {"hosts": 2, "most_hosts": 2, "size_mb": 1.0, "repeats": 2}
        return dataclasses.replace(self, **small) if self.tiny else self

    def where(self) -> str:
        """What it runs on."""
        return (
            f"{self.scaled().hosts} hosts (namespaces of this machine), links of "
            f"{self.rate} each way, packets of {self.mtu} bytes"
        )

    @property
    def sizes_mb(self) -> list[float]:
        """Φ at N = hosts, from small to large."""
        if self.tiny:
            return [1.0]
        given = self.size_mb
        return [*(s for s in (0.25, 1.0, 4.0) if s < given), given, 4 * given]

    @property
    def fewer(self) -> int:
        """Blocks where there is much to time: at other N, and of training steps."""
        return max(2, self.repeats // 2)

    @property
    def counts(self) -> list[int]:
        """The other N."""
        return [n for n in range(2, self.most_hosts + 1) if n != self.hosts]

    @property
    def trained(self) -> list[int]:
        """How many hosts train: as many as have a core each, and all."""
        cores = max(2, min(os.cpu_count() or 2, self.hosts))
        return sorted({cores, self.hosts}) if self.training else []


def run(config: Config) -> Result:
    """Answers the question."""
    config = config.scaled()
    count = max(config.hosts, config.most_hosts)
    with network.Hosts(count, config.rate, config.mtu) as hosts:
        show.console.print(f"starting processes on {count} hosts")
        with turns.start(hosts) as groups:
            main, others = all_reduces(config, groups)
        steps = [
            row for n in config.trained for row in training_steps(config, n, hosts)
        ]
    return answer(config, main, others, steps)


def all_reduces(config: Config, groups: Groups) -> tuple[turns.Measured, Rows]:
    """All ways at N = hosts, by size; and their times at other N."""

    def cases(devices: int, size_mb: float) -> list[turns.Case]:
        names = ways.names(devices, groups.torch)
        return [turns.Case(name, devices, size_mb) for name in names]

    at_hosts = [c for s in config.sizes_mb for c in cases(config.hosts, s)]
    over_n = [c for n in config.counts for c in cases(n, config.size_mb)]
    over_n = [case for case in over_n if case.way != ways.PERMUTE]
    fewer = config.fewer
    blocks = len(at_hosts) * (config.repeats + 1) + len(over_n) * (fewer + 1)
    with show.progress("summing in turns", blocks) as advance:
        main = turns.measure(groups, at_hosts, config.repeats, advance)
        others = turns.measure(groups, over_n, fewer, advance)
    return main, others.times


def training_steps(config: Config, count: int, hosts: network.Hosts) -> Rows:
    """Steps of all designs on so many hosts."""
    show.console.print(f"starting processes on {count} hosts, to train")
    how = TINY_TRAINING if config.tiny else TRAINING
    training, repeats = Training(hosts, count, *how), config.fewer
    with training.groups:
        if not config.tiny:
            training.balance()
        blocks = len(training.blocks()) * (repeats + 1)
        with show.progress("training in turns", blocks) as advance:
            return measure(training, repeats, advance)


def answer(config: Config, main: turns.Measured, others: Rows, steps: Rows) -> Result:
    """Claims, tables and figures."""
    size_mb, hosts = config.size_mb, config.hosts
    times = sorted([*main.times, *others], key=lambda row: row["devices"])
    label = (
        f"links of {config.rate}; headers make {ways.overhead(config.mtu):.3f} of the "
        "bound the least; medians and quartiles of blocks in turns"
    )
    traffic = [row for row in main.traffic if row["size_mb"] == size_mb]
    one_size = [row for row in times if row["size_mb"] == size_mb]
    summed = [row for row in one_size if row["algorithm"] != ways.PERMUTE]
    found = [claims.servers(times, traffic, hosts, size_mb, config.fewer)]
    drawn: dict[str, Figure] = {
        "Time by number of hosts": figures.against_hosts(summed, config.rate, size_mb),
        "Time by size": figures.against_size(main.times, config.rate, hosts),
        "Bytes by link": figures.traffic(traffic, size_mb),
    }
    tables: dict[str, Rows] = {
        "all_reduce": [{**row, "label": label} for row in times],
        "bytes": main.traffic,
    }
    for n in config.trained:
        rows = [row for row in steps if row["hosts"] == n]
        tables[f"training_on_{n}_hosts"] = rows
        drawn[f"Training steps on {n} hosts"] = figures.training(rows)
    if steps:  # hosts with a core each come first
        own = tables[f"training_on_{config.trained[0]}_hosts"]
        found.append(claims.asynchrony(own, config.fewer))
    return Result(claims=found, tables=tables, figures=drawn)
