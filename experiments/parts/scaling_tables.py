"""Throughput by hardware, model and number of devices; where it stops growing."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.harness.result import Rows
from experiments.parts.scaling_hardware import DESCRIBED, HOSTS
from experiments.parts.scaling_steps import Priced

DP, DDP, NATIVE = "DP", "DDP", "native"
DESIGNS = (DP, DDP, NATIVE)
IN_A_HOST = (2, 4, 8)
CLAIMED = (15, 30)  # per cent by which DDP is faster
LABEL = "predicted from compiled steps and published figures of chips and links"


class Curve(NamedTuple):
    """A model on some hardware.

    Attributes:
        hardware: Its name.
        model: Its name.
        rows: Of one device.
        alone_ms: The step of one device.
        steps: For each design, a step for each number of devices.
    """

    hardware: str
    model: str
    rows: int
    alone_ms: float
    steps: Mapping[str, Sequence[Priced]]

    @property
    def counts(self) -> list[int]:
        """Numbers of devices."""
        return [step.devices for step in self.steps[DP]]

    def times(self, design: str) -> list[float]:
        """Throughput, in that of one device."""
        return [
            step.devices * self.alone_ms / step.step_ms for step in self.steps[design]
        ]

    def at(self, design: str, devices: int) -> float:
        """Throughput with some devices, in that of one."""
        return self.times(design)[self.counts.index(devices)]

    @property
    def best(self) -> int:
        """The fewest devices with which DP is fastest."""
        times = self.times(DP)
        return self.counts[times.index(max(times))]

    @property
    def bound(self) -> float:
        """What DP's throughput cannot pass in a host, in that of one device.

        N devices take the time C + 2 (N - 1) t of a step, so N C / (C + 2 (N - 1) t),
        towards C / 2t; from N = 1 on it falls if that is below 1.
        """
        two = self.steps[DP][self.counts.index(2)]
        return self.alone_ms / two.exposed_ms  # both ways over the link: 2 t


def throughput(curves: Sequence[Curve]) -> Rows:
    """Samples a second, and the efficiency against N times one device."""
    rows = []
    for curve in curves:
        for i, n in enumerate(curve.counts):
            row: dict[str, Any] = {
                "hardware": curve.hardware,
                "model": curve.model,
                "N": n,
            }
            for design in DESIGNS:
                step = curve.steps[design][i]
                row[design] = round(1e3 * n * curve.rows / step.step_ms)
            for design in (DP, DDP):
                row[f"{design}, %"] = round(100 * curve.times(design)[i] / n, 1)
            label = f"samples a second; %: of N times one device; {LABEL}"
            rows.append(row | {"label": label})
    return rows


def stops(curves: Sequence[Curve]) -> Rows:
    """Where DP is fastest, and what it gains there."""
    return [
        {
            "hardware": curve.hardware,
            "model": curve.model,
            "one device_ms": curve.alone_ms,
            "best N": curve.best,
            "times one": max(curve.times(DP)),
            "at most": curve.bound,
            "N = 4": curve.at(DP, 4),
            "N = 8": curve.at(DP, 8),
            "label": f"{LABEL}; throughput of DP in that of one device",
        }
        for curve in curves
    ]


def faster(curves: Sequence[Curve]) -> Rows:
    """By how many per cent DDP is faster than DP, where a host has so many devices."""
    return [
        {
            "hardware": curve.hardware,
            "model": curve.model,
            **{f"N = {n}, %": gain(curve, n) for n in IN_A_HOST},
            "DP exists": curve.hardware in HOSTS,
            "label": f"{LABEL}; DP needs its devices in one host: elsewhere, if it did",
        }
        for curve in curves
        if "8 a host" not in curve.hardware  # as NVLink, for so few devices
    ]


def gain(curve: Curve, devices: int) -> float:
    """By how many per cent of DP's time DDP is faster."""
    (dp,), (ddp,) = (
        [step for step in curve.steps[design] if step.devices == devices]
        for design in (DP, DDP)
    )
    return 100 * (1 - ddp.step_ms / dp.step_ms)


def hardware(names: Sequence[str]) -> Rows:
    """What names mean."""
    return [{"hardware": name, "what": DESCRIBED[name]} for name in names]
