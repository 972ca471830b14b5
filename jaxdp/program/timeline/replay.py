"""When a compiled program computes and communicates: a prediction for some hardware.

One run of the program from idle devices, as XLA scheduled it. A kernel takes what its
FLOPs or its bytes take, whichever is longer (`work`); a collective what the links
between its devices take (`transfers`); both run side by side where the schedule has
something between start and done (`streams`).
"""

import collections
import os
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxdp.program.hlo import Module
from jaxdp.program.timeline.records import (
    COMMUNICATION,
    COMPUTE,
    Record,
    busy_s,
    critical_path,
)
from jaxdp.program.timeline.scheduled import Item, Kernel, flat, schedule
from jaxdp.program.timeline.streams import Streams
from jaxdp.targets.hardware import Hardware, hardware

_FIGURES = (".png", ".svg", ".pdf")
_LARGEST = 5  # kernels that are printed


class Bar(NamedTuple):
    """What a stream does, in seconds since the run began.

    Attributes:
        stream: "compute" or "communication".
        name: Of the instruction.
        kind: "matrix product", "convolution", "other kernel", or the collective's.
        start_s: When it starts.
        end_s: When it ends. On the communication stream this may be the longer of
            what the device sends and what it receives.
        device: Whose stream it is.
    """

    stream: Literal["compute", "communication"]
    name: str
    kind: str
    start_s: float
    end_s: float
    device: int


@dataclass(frozen=True)
class Timeline:
    """One run of a program, predicted.

    Attributes:
        step_s: From the first start to the last end on any device.
        compute_s: What the compute stream of the busiest device is busy for.
        communication_s: What its communication stream is busy for.
        device: The busiest: the one that communicates longest.
        bars: What it does when.
        critical_path: Names of the bars that make the step, first to last: each starts
            when the one before ends, on its device or on another.
        hardware: What the times are for.
        unknown_calls: Custom calls whose FLOPs count as 0: nobody knows them.
    """

    step_s: float
    compute_s: float
    communication_s: float
    device: int
    bars: tuple[Bar, ...] = field(repr=False)
    critical_path: tuple[str, ...] = field(repr=False)
    hardware: Hardware = field(repr=False)
    unknown_calls: tuple[str, ...] = ()

    @property
    def exposed_s(self) -> float:
        """What communication adds to the step."""
        return self.step_s - self.compute_s

    @property
    def exposed_fraction(self) -> float:
        """The share of communication that adds to the step; 0 if there is none."""
        return self.exposed_s / self.communication_s if self.communication_s else 0.0

    @property
    def utilisation(self) -> float:
        """The share of the step in which the device computes."""
        return self.compute_s / self.step_s if self.step_s else 0.0

    def save(self, path: str | os.PathLike) -> None:
        """Writes the timeline to a file.

        Args:
            path: Ends in ".json" for a trace that https://ui.perfetto.dev opens, or in
                ".png", ".svg" or ".pdf" for a figure.

        Raises:
            ValueError: Another suffix.
            ModuleNotFoundError: A figure, and matplotlib is not installed.
        """
        suffix = pathlib.Path(path).suffix.lower()
        if suffix == ".json":
            from jaxdp.program.timeline.perfetto import trace

            pathlib.Path(path).write_text(trace(self), encoding="utf-8")
        elif suffix in _FIGURES:
            from jaxdp.draw.timeline import draw_timeline

            draw_timeline(self, path)
        else:
            raise ValueError(
                f"Timeline.save got {os.fspath(path)!r}, which ends in {suffix!r}. It "
                f"writes .json, a trace for Perfetto, or a figure: "
                f"{', '.join(_FIGURES)}. Choose one of these suffixes."
            )

    def __str__(self) -> str:
        """A few lines: the times, and which kernels take most."""
        lines = [
            f"one step on {self.hardware.name}, predicted: {_ms(self.step_s)} (device "
            f"{self.device})",
            f"compute        {_ms(self.compute_s)}, {self.utilisation:.0%} of the step",
            f"communication  {_ms(self.communication_s)}, of which exposed "
            f"{_ms(self.exposed_s)}, {self.exposed_fraction:.0%}",
        ]
        spent = collections.defaultdict(float)
        for bar in self.bars:
            if bar.stream == COMPUTE:
                spent[bar.name, bar.kind] += bar.end_s - bar.start_s
        if spent:
            lines.append("the largest kernels:")
        largest = sorted(spent.items(), key=lambda item: -item[1])[:_LARGEST]
        for (name, kind), seconds in largest:
            lines.append(f"  {_ms(seconds)}  {name}, {kind}")
        if self.unknown_calls:
            calls = ", ".join(self.unknown_calls)
            lines.append(f"FLOPs unknown, counted as 0: {calls}")
        return "\n".join(lines)


def replay(module: Module, hardware: Hardware | str) -> Timeline:
    """Predicts one run of a compiled program.

    Args:
        module: The parsed program.
        hardware: Or the name of a target, such as "h100".

    Raises:
        ValueError: An unknown target; a loop whose trip count, or a product whose FLOPs
            the text does not say; a collective that cannot be read.
    """
    return play(schedule(module), module.devices, _hardware(hardware))


def play(items: tuple[Item, ...], devices: int, hardware: Hardware) -> Timeline:
    """Predicts one run of a schedule that was read before.

    Args:
        items: From `jaxdp.program.timeline.scheduled.schedule`.
        devices: How many issue them.
        hardware: What runs them.
    """
    streams = Streams(devices, hardware)
    streams.run(items)
    busy = {
        stream: busy_s(streams.records, stream, devices)
        for stream in (COMPUTE, COMMUNICATION)
    }
    device = int(busy[COMMUNICATION].argmax())
    kernels = (item for item in flat(items) if isinstance(item, Kernel))
    unknown = (target for kernel in kernels for target in kernel.work.unknown_calls)
    return Timeline(
        step_s=streams.end_s,
        compute_s=float(busy[COMPUTE][device]),
        communication_s=float(busy[COMMUNICATION][device]),
        device=device,
        bars=tuple(_bars(streams.records, device)),
        critical_path=critical_path(streams.records, streams.end_s),
        hardware=hardware,
        unknown_calls=tuple(dict.fromkeys(unknown)),
    )


_hardware = hardware  # `replay` has an argument of that name


def _bars(records: Sequence[Record], device: int) -> Iterator[Bar]:
    for record in records:
        start, end = float(record.start_s[device]), float(record.end_s[device])
        if end > start:  # neither no time nor NaN
            yield Bar(record.stream, record.name, record.kind, start, end, device)  # type: ignore[arg-type]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
