"""What the streams of devices did in a replay, and which of it made the step."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxdp.program.collective import CollectiveOp

COMPUTE, COMMUNICATION = "compute", "communication"
_ROUNDING = 1e-9  # of the step: times that are equal but for rounding


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """What a stream of each device does once: from when to when, by device.

    Attributes:
        stream: `COMPUTE` or `COMMUNICATION`.
        name: The instruction.
        kind: Of the kernel or the collective.
        start_s: NaN for a device that takes no part.
        end_s: As `start_s`.
        busy_s: What lies between, or less if this stands for many trips of a loop.
        op: What is communicated.
    """

    stream: str
    name: str
    kind: str
    start_s: np.ndarray
    end_s: np.ndarray
    busy_s: np.ndarray
    op: CollectiveOp | None = None

    def later(self, by_s: np.ndarray) -> "Record":
        """The same some time later, which may differ by device."""
        start, end = self.start_s + by_s, self.end_s + by_s
        return dataclasses.replace(self, start_s=start, end_s=end)


def busy_s(records: Sequence[Record], stream: str, devices: int) -> np.ndarray:
    """How long a stream of each device is busy."""
    total = np.zeros(devices)
    for record in records:
        if record.stream == stream:
            total += np.nan_to_num(record.busy_s)
    return total


def critical_path(records: Sequence[Record], end_s: float) -> tuple[str, ...]:
    """Names of what makes a step of `end_s`, first to last.

    Walks back from the last end, to what ends where the one found before starts: on the
    same device, or on one that starts it together with it.
    """
    time_s, close = end_s, _ROUNDING * end_s
    where: Sequence[int] | slice = slice(None)  # devices it may be on
    found = []
    for record in reversed(records):
        starts, ends = record.start_s[where], record.end_s[where]
        fits = (np.abs(ends - time_s) <= close) & (ends - starts > close)
        if fits.any():
            devices = np.arange(len(record.end_s))[where]
            device = int(devices[fits.argmax()])
            found.append(record.name)
            time_s = record.start_s[device]
            where = _together(record.op, device)
    return tuple(reversed(found))


def _together(op: CollectiveOp | None, device: int) -> list[int]:
    """The devices that start something together with one."""
    members = () if op is None else op.pairs or op.groups
    return sorted({device}.union(*(each for each in members if device in each)))


def merged(name: str, trip: list[Record], by_s: np.ndarray, times: int) -> list[Record]:
    """One record a stream for many trips like one, of the kind that takes most."""
    found = []
    for stream in (COMPUTE, COMMUNICATION):
        own = [record for record in trip if record.stream == stream]
        if own:
            most = max(own, key=lambda record: np.nansum(record.busy_s))
            found.append(
                Record(
                    stream,
                    f"{name}, {times} trips",
                    most.kind,
                    np.fmin.reduce([record.start_s for record in own]) + by_s,
                    np.fmax.reduce([record.end_s for record in own]) + times * by_s,
                    times * np.nansum([record.busy_s for record in own], axis=0),
                    most.op,
                )
            )
    return found
