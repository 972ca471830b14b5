"""How long a scheduled step takes on devices with two streams: a prediction.

Every device has a compute stream and a communication stream, and issues one schedule.
A kernel takes what its FLOPs or its bytes take, whichever is longer. A transfer starts
when it is issued on both its devices and their communication streams are free; it takes
a latency + bytes / bandwidth on both. Other devices pass it by.

Left out, so that real steps are longer: what a transfer takes from kernels that run
beside it, launches, and the host's look at a condition.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from experiments.parts.overlap_schedule import Done, Item, Kernel

STEPS = 3  # the last is steady: it starts as the one before has left the streams
SERVER = 0
COMPUTE, COMMUNICATION = "compute", "communication"
MATMUL, OTHER, PUSH, PULL = KINDS = (
    "matrix multiplication",
    "other kernel",
    "push",
    "pull",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """An H100 SXM and its link; half of the peak is what good kernels reach."""

    flops_per_s: float = 0.5 * 989e12  # of bfloat16, without sparsity
    memory_bytes_per_s: float = 3.35e12
    link_bytes_per_s: float = 450e9  # NVLink, each way
    alpha_s: float = 10e-6  # of every transfer

    def kernel_s(self, kernel: Kernel) -> float:
        """How long a kernel takes: the roofline."""
        return max(
            kernel.flops / self.flops_per_s, kernel.bytes / self.memory_bytes_per_s
        )

    def transfer_s(self, size_bytes: int) -> float:
        """How long a transfer takes."""
        return self.alpha_s + size_bytes / self.link_bytes_per_s


class Bar(NamedTuple):
    """What a stream of the server does, in seconds since the step began."""

    stream: str  # COMPUTE or COMMUNICATION
    kind: str  # of KINDS
    start_s: float
    end_s: float


class Estimate(NamedTuple):
    """The step of the server, which is the busiest device.

    Attributes:
        step_s: From step to step.
        compute_s: What its compute stream is busy for.
        communication_s: What its communication stream is busy for.
        bars: What it does when.
    """

    step_s: float
    compute_s: float
    communication_s: float
    bars: tuple[Bar, ...]

    @property
    def exposed_s(self) -> float:
        """What communication adds to the step."""
        return self.step_s - self.compute_s

    @property
    def hidden(self) -> float:
        """The share of communication that adds nothing to the step."""
        return 1 - self.exposed_s / self.communication_s


class Bounds(NamedTuple):
    """Step times in seconds: one after the other, and side by side."""

    synchronous_s: float
    overlapped_s: float


def estimate(items: Sequence[Item], devices: int, hardware: Hardware) -> Estimate:
    """Runs a schedule on all devices, a few steps one after the other."""
    streams = _Streams(devices, hardware)
    ends = [0.0]
    for _ in range(STEPS):
        streams.bars.clear()
        for item in items:
            streams.issue(item)
        streams.finish()
        ends.append(streams.compute[SERVER])
    before, end = ends[-2:]
    bars = tuple(
        Bar(stream, kind, start - before, until - before)
        for stream, kind, start, until in streams.bars
    )
    busy = {COMPUTE: 0.0, COMMUNICATION: 0.0}
    for bar in bars:
        busy[bar.stream] += bar.end_s - bar.start_s
    return Estimate(end - before, busy[COMPUTE], busy[COMMUNICATION], bars)


def bounds(
    compute_s: float, size_bytes: int, devices: int, hardware: Hardware
) -> Bounds:
    """The step times that dependences allow.

    Args:
        compute_s: What kernels take.
        size_bytes: Φ, which the server receives from and sends to each of the others.
        devices: N.
        hardware: Whose link carries it.
    """
    communication_s = 2 * (devices - 1) * hardware.transfer_s(size_bytes)
    return Bounds(compute_s + communication_s, max(compute_s, communication_s))


class _Streams:
    """Until when the streams of every device are taken."""

    def __init__(self, devices: int, hardware: Hardware):
        self.hardware = hardware
        self.compute = [0.0] * devices
        self.communication = [0.0] * devices
        self.ends: dict[tuple[str, int], float] = {}  # of a transfer on a device
        self.bars: list[Bar] = []  # of the server

    def issue(self, item: Item) -> None:
        """All devices issue one item."""
        if isinstance(item, Kernel):
            took = self.hardware.kernel_s(item)
            start = self.compute[SERVER]
            self.compute = [now + took for now in self.compute]
            kind = MATMUL if item.flops else OTHER
            self.bars.append(Bar(COMPUTE, kind, start, start + took))
        elif isinstance(item, Done):
            self._wait(item.start)
        else:
            for pair in item.pairs:
                self._transfer(item.name, pair, item.bytes)
            if item.blocks:
                self._wait(item.name)

    def finish(self) -> None:
        """Every device waits for its own streams before it starts the next step."""
        pairs = zip(self.compute, self.communication, strict=True)
        self.compute = [max(pair) for pair in pairs]

    def _transfer(self, name: str, pair: tuple[int, int], size_bytes: int) -> None:
        start = max(
            max(self.compute[device], self.communication[device]) for device in pair
        )
        end = start + self.hardware.transfer_s(size_bytes)
        for device in pair:
            self.communication[device] = self.ends[name, device] = end
        if SERVER in pair:
            kind = PULL if pair[0] == SERVER else PUSH
            self.bars.append(Bar(COMMUNICATION, kind, start, end))

    def _wait(self, name: str) -> None:
        """The compute stream of every device of a transfer waits for it."""
        for device, now in enumerate(self.compute):
            self.compute[device] = max(now, self.ends.get((name, device), now))
