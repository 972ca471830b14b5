"""Times all ways to sum over hosts, in turns, and reads what their links carried.

A block of calls is timed, not one: a link that has idled carries 80 KiB at once, which
a small buffer would take for a fast link.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.harness.result import Rows
from experiments.network import Hosts, bytes_per_s
from experiments.parts import bandwidth_ways as ways
from experiments.parts.bandwidth_groups import Groups

BLOCK_MB = 4.0  # summed at least in a block


class Case(NamedTuple):
    """What is timed."""

    way: str
    devices: int
    size_mb: float

    @property
    def calls(self) -> int:
        """In a block."""
        return math.ceil(BLOCK_MB / self.size_mb)


class Block(NamedTuple):
    """What one block of calls took and moved, by call."""

    seconds: float
    sent_bytes: list[float]  # by host, counted by the kernel
    received_bytes: list[float]


class Measured(NamedTuple):
    """Rows of times, and rows of bytes by host."""

    times: Rows
    traffic: Rows


def start(hosts: Hosts) -> Groups:
    """The processes that `measure` asks."""
    return Groups(hosts, len(hosts.names), "bandwidth_jax", "bandwidth_torch")


def measure(
    groups: Groups,
    cases: Sequence[Case],
    repeats: int,
    advance: Callable[[], Any] = lambda: None,
) -> Measured:
    """Times cases in turns.

    Args:
        groups: Who runs them; made by `start`.
        cases: What is timed.
        repeats: Blocks of each, at least 2.
        advance: Called `repeats + 1` times for every case.
    """
    programs, blocks = {}, {case: [] for case in cases}
    for case in cases:
        programs[case] = _check(groups, case)
        advance()
    order = [*cases]
    for _ in range(repeats):
        for case in order:
            blocks[case].append(_block(groups, case))
            advance()
        order.reverse()  # nobody always follows the same
    rate = bytes_per_s(groups.hosts.rate)
    return Measured(
        [timed(case, blocks[case], rate) for case in cases],
        [row for case in cases for row in carried(case, programs[case], blocks[case])],
    )


def timed(case: Case, blocks: Sequence[Block], rate: float) -> dict[str, Any]:
    """Median and quartiles, beside the bound for links of `rate` bytes a second."""
    seconds = [block.seconds for block in blocks]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    bound = ways.bound_s(*case, rate)
    return {
        "algorithm": case.way,
        "devices": case.devices,
        "size_mb": case.size_mb,
        "time_ms": 1e3 * median,
        "bound_ms": 1e3 * bound,
        "ratio": median / bound,
        "low_ms": 1e3 * low,
        "high_ms": 1e3 * high,
    }


def carried(case: Case, program: Sequence[int], blocks: Sequence[Block]) -> Rows:
    """Bytes of a call by host: in the compiled program, and counted by the kernel.

    Args:
        case: What ran.
        program: What each device sends by the program; empty for PyTorch, which has
            none.
        blocks: What the kernel counted.
    """
    rows = []
    for host in range(case.devices):
        sent = statistics.median(block.sent_bytes[host] for block in blocks)
        received = statistics.median(block.received_bytes[host] for block in blocks)
        expected = program[host] if program else None
        rows.append(
            {
                "algorithm": case.way,
                "devices": case.devices,
                "size_mb": case.size_mb,
                "host": host,
                "program_bytes": expected,
                "sent_bytes": round(sent),
                "received_bytes": round(received),
                "sent / program": sent / expected if expected else None,
            }
        )
    return rows


def _check(groups: Groups, case: Case) -> list[int]:
    """Compiles, warms up and checks the sum; returns what each device sends."""
    if case.way == ways.TORCH:
        _seconds(groups, case, calls=1)
        return []
    return groups.ask(False, range(case.devices), do="check", **case._asdict())[0]


def _block(groups: Groups, case: Case) -> Block:
    """Runs one block."""
    before = groups.hosts.counters()
    seconds = _seconds(groups, case, case.calls)
    after = groups.hosts.counters()
    moved = [
        [(b - a) / case.calls for a, b in zip(*pair, strict=True)]
        for pair in zip(before, after, strict=True)
    ]
    sent, received = map(list, zip(*moved, strict=True))
    return Block(seconds, sent, received)


def _seconds(groups: Groups, case: Case, calls: int) -> float:
    """Seconds of a call, of the slowest process."""
    torch = case.way == ways.TORCH
    options: dict[str, Any] = {**case._asdict(), "calls": calls}
    if torch:
        del options["way"]
    return max(groups.ask(torch, range(case.devices), do="seconds", **options))
