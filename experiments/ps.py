"""What does the link of a parameter server carry, and do several servers share it?

Command:   make experiment EXP=ps         ARGS="--devices 8 --gbit-per-s 10"
Hardware:  any; without GPUs, 8 forced host devices.
Runtime:   about 60 s on two cores.

Synchronous parameter servers: workers push gradients to S servers, each of which owns a
part of every parameter, updates it and sends it back. What travels is counted in
compiled programs, for S = 1, 2, 4 servers and N = 2 to 8 devices, servers working or
dedicated, beside a ring. Then the same network as in `compare` learns digits with each.

Expected numbers, for N devices and Φ bytes of gradients:
  one server that works too   (N - 1) Φ in, and (N - 1) Φ out
  each of S servers           1 / S of that, to the byte
  all links together          2 (N - 1) Φ, for any S, and for a ring
  time, one server / ring     N on links of limited bandwidth; below 1 for small Φ,
                              since the ring takes 2 (N - 1) rounds and a server 2
  copies of the parameters    bit-identical on all devices after every step

Loss, weight and a flag per worker travel in the same messages: 40 bytes in each.
"""

import dataclasses
import functools
from typing import Any

import jaxdp
from experiments.harness import config as harness
from experiments.harness import show, timing
from experiments.harness.result import Claim, Result, Rows
from experiments.ledger import catalogue
from experiments.parts import digits, lockstep, server_times, server_traffic
from experiments.parts.server_traffic import PHI

TRAINED = {
    "gather to root": jaxdp.GatherToRoot(),
    "1 server": jaxdp.ParameterServer(),
    "2 servers": jaxdp.ParameterServer(servers=2),
    "4 servers": jaxdp.ParameterServer(servers=4),
    "4 servers, workers update": jaxdp.ParameterServer(4, update_on="worker"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    epochs: int = 3  # passes over the training images
    batch_size: int = 128  # rows over all devices
    gbit_per_s: float = 10.0  # of a link, for predicted times
    repeats: int = timing.REPEATS  # timed steps of each design

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        self.check_divides(self.batch_size)
        if self.devices < 4 or self.epochs < 1 or not self.gbit_per_s > 0:
            raise ValueError(
                f"--devices got {self.devices}, --epochs {self.epochs} and "
                f"--gbit-per-s {self.gbit_per_s}. Four servers need at least 4 "
                "devices, training at least one epoch, and a link a bandwidth above "
                "0. Use --devices 8 --epochs 3 --gbit-per-s 10, for example."
            )


def run(config: Config) -> Result:
    """Answers the question."""
    counts = [4, config.devices] if config.tiny else range(2, config.devices + 1)
    chosen = [(n, *how) for n in counts for how in server_traffic.arrangements(n)]
    with show.progress("counting bytes in programs", len(chosen)) as advance:
        served = [_advanced(server_traffic.served(*how), advance) for how in chosen]
    designs = server_traffic.designs(config.devices)
    steps = [
        server_traffic.whole_step(name, design, config.devices)
        for name, design in designs.items()
    ]
    times = server_times.by_size(config.devices, config.gbit_per_s)
    runs, step_times = train(config)
    return Result(
        claims=[
            claim_traffic(steps, times, config),
            claim_share(served, config.devices),
        ],
        tables={
            "served_by_one_server": served,
            "whole_steps": steps,
            "predicted_times": times,
            "training": runs,
            "step_times": step_times,
        },
        figures={
            "What one server sends": server_traffic.plot_served(served),
            "Time of one exchange": server_times.plot(
                times, config.devices, config.gbit_per_s
            ),
        },
        programs={
            f"step with {name}": server_traffic.step(design, config.devices)
            for name, design in designs.items()
        },
    )


def _advanced(row: dict[str, Any], advance: Any) -> dict[str, Any]:
    """The row, after telling the progress bar."""
    advance()
    return row


@harness.full_precision
def train(config: Config) -> tuple[Rows, Rows]:
    """Trains with every design in lockstep, and times further steps."""
    problem = digits.problem(seed=0, learning_rate=0.05, momentum=0.9)
    epochs = 1 if config.tiny else config.epochs
    data = [*digits.batches(problem.train, config.batch_size, epochs, seed=0)]
    given = problem.loss_fn, problem.optimizer, problem.params, data[0]
    mesh = jaxdp.data_mesh(config.devices)
    trainers = {lockstep.ALONE: lockstep.single(*given)}
    for name, design in TRAINED.items():
        trainers[name] = lockstep.parallel(*given, mesh, design)
    with show.progress("training in lockstep", len(data)) as advance:
        history = lockstep.train(trainers, data, advance)
    rows = [
        {
            "design": name,
            "test accuracy": problem.accuracy(trainers[name].params()),
            "apart from one device": max(history.differences[name]),
            "copies compared": history.compared[name],
            "copies that differ": history.differing[name],
        }
        for name in TRAINED
    ]
    calls = {n: functools.partial(trainers[n].step, data[0]) for n in TRAINED}
    repeats = 2 if config.tiny else config.repeats
    with show.progress("timing steps", repeats) as advance:
        times = timing.interleaved(calls, repeats, advance)
    return rows, [{"design": name} | time._asdict() for name, time in times.items()]


def claim_traffic(steps: Rows, times: Rows, config: Config) -> Claim:
    """CB2."""
    by_name = {row["design"]: row for row in steps}
    n, biggest = config.devices, times[-1]
    ring, server = by_name["ring"], by_name["1 server"]
    ratio = biggest["1 server / ring"]
    smallest = times[0]["1 server / ring"]
    same = abs(server["all links/Φ"] / ring["all links/Φ"] - 1) < 0.01
    return Claim(
        id="CB2",
        claim=catalogue.text("CB2"),
        expected=n,
        measured=ratio,
        unit="times longer than a ring, predicted for ResNet-50",
        verdict="holds" if same and abs(ratio / n - 1) < 0.1 else "refuted",
        why=f"All links together carry {server['all links/Φ']:.2f} Φ with one server "
        f"and {ring['all links/Φ']:.2f} Φ in a ring (counted in the compiled steps). "
        f"The server's link carries {server['busiest sends/Φ']:.2f} Φ each way, a "
        f"device of the ring {ring['busiest sends/Φ']:.2f} Φ. Times are predicted from "
        f"that, at {config.gbit_per_s:g} Gbit/s and 20 µs a round: the claim is about "
        f"bandwidth. At {times[0]['size_bytes']:,} bytes latency decides, and one "
        f"server takes {smallest:.2f} of the ring's time.",
    )


def claim_share(served: Rows, devices: int) -> Claim:
    """CB6."""
    rows = [row for row in served if row["devices"] == devices]
    most = max(row["servers"] for row in rows)
    exact = all(row["as expected to the byte"] for row in served)
    shares = {row["servers"]: row["of one server's"] for row in rows}
    return Claim(
        id="CB6",
        claim=catalogue.text("CB6"),
        expected=1 / most,
        measured=shares[most],
        unit=f"of one server's bytes, S = {most}",
        verdict="holds" if exact else "refuted",
        why=f"In all {len(served)} arrangements counted, a server sends (N - 1) Φ / S "
        "and receives as much, or, if it is dedicated, the Φ / S of N - S workers: to "
        f"the byte, for Φ = {PHI:,} bytes. A server that works is also a worker of the "
        "others: its link carries (S - 1) Φ / S more each way.",
    )
