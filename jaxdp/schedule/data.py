"""Schedules as data, and where chunks lie in a device's buffer."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

Placement = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One `ppermute`: every source sends one chunk.

    Attributes:
        pairs: `(source, target)` of each message; sources and targets are unique.
        chunks: The chunk that each pair moves.
        op: Whether the target adds it to the chunk it holds, or replaces that.
    """

    pairs: Pairs
    chunks: tuple[int, ...]
    op: Literal["add", "replace"]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yields `(source, target, chunk)`."""
        for (source, target), chunk in zip(self.pairs, self.chunks, strict=True):
            yield source, target, chunk


@dataclasses.dataclass(frozen=True)
class Round:
    """Transfers that run at the same time: all send what they held before the round.

    Attributes:
        transfers: What moves; what arrives is applied in this order.
    """

    transfers: tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A complete collective; `jaxdp.schedule` says what its data mean.

    Attributes:
        name: For messages and figures, such as "ring(8)".
        devices: N.
        chunks: Into how many equal chunks a buffer is cut.
        starts: Of each chunk, the devices that start with a contribution to it.
        ends: Of each chunk, the devices that must end with it complete.
        rounds: What moves, round by round.
        family: Builds the same algorithm for another number of devices, where it is
            known.
    """

    name: str
    devices: int
    chunks: int
    starts: Placement = dataclasses.field(repr=False)
    ends: Placement = dataclasses.field(repr=False)
    rounds: tuple[Round, ...] = dataclasses.field(repr=False)
    family: "Callable[[int], Schedule] | None" = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __hash__(self) -> int:
        """Of name and sizes alone: rounds may hold a million pairs."""
        return hash((self.name, self.devices, self.chunks, len(self.rounds)))

    def resized(self, devices: int) -> "Schedule":
        """The same algorithm for another number of devices.

        Raises:
            ValueError: The schedule was made by hand, for its own devices alone; or the
                algorithm does not exist for so many.
        """
        if devices == self.devices:
            return self
        if self.family is None:
            raise ValueError(
                f"{self.name}.resized got {devices} devices. This schedule was made "
                f"for {self.devices} alone. Build it with a function that takes a "
                "number of devices, and pass that as its `family`."
            )
        return self.family(devices)

    def then(self, following: "Schedule", name: str) -> "Schedule":
        """Runs `following` where this schedule ends.

        Raises:
            ValueError: `following` does not start where this schedule ends.
        """
        if (self.devices, self.ends) != (following.devices, following.starts):
            raise ValueError(
                f"{self.name}.then got {following.name}, which starts on "
                f"{following.starts} of {following.devices} devices. It must start "
                f"where {self.name} ends: {self.ends} of {self.devices} devices. "
                "Build both for the same devices, chunks and root."
            )
        rounds = self.rounds + following.rounds
        ends = following.ends
        return dataclasses.replace(
            self, name=name, ends=ends, rounds=rounds, family=None
        )


def local_rows(placement: Placement) -> int:
    """How many chunks a device's local buffer has room for.

    Args:
        placement: Of each chunk, the devices that hold it, such as `schedule.starts`.

    Returns:
        All, unless every chunk lies on one device alone: then as many as the device
        with most of them holds.
    """
    if any(len(devices) != 1 for devices in placement):
        return len(placement)
    return max(collections.Counter(placement).values())


def local_row(placement: Placement, chunk: int) -> int:
    """In which row of a local buffer a chunk lies: a device's chunks are in order.

    Args:
        placement: Of each chunk, the devices that hold it, such as `schedule.ends`.
        chunk: The chunk.

    Returns:
        The row, from 0 to `local_rows(placement) - 1`.
    """
    if local_rows(placement) == len(placement):
        return chunk
    return placement[:chunk].count(placement[chunk])
