"""A collective algorithm as data: who sends which chunk to whom, round by round.

A buffer is cut into `chunks` equal chunks. A `Schedule` lists `Round`s; a round lists
`Transfer`s that run at the same time; a transfer is one `jax.lax.ppermute`: every
source sends one chunk, and the target adds it to the chunk it holds or replaces that.
Every reader (executor, simulator, verifier, cost model, drawer) works on this data
alone.

One sentence defines every collective. Chunk `c` starts as one contribution on each
device of `starts[c]` and must end, as the sum of exactly those contributions, on each
device of `ends[c]`:

    collective       starts[c]      ends[c]
    all_reduce       all devices    all devices
    reduce_scatter   all devices    the owner of c
    all_gather       the owner      all devices
    reduce           all devices    the root
    broadcast        the root       all devices
    gather           device c       the root
    scatter          the root       device c
    push             the workers    the server of c
    collect          one worker     the server of c
    pull             the server     all devices
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

Placement = tuple[tuple[int, ...], ...]
Holdings = tuple[tuple[frozenset[int], ...], ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One `ppermute`: pair `i` is `(source, target)` and moves chunk `chunks[i]`."""

    pairs: tuple[tuple[int, int], ...]
    chunks: tuple[int, ...]
    op: Literal["add", "replace"]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yields `(source, target, chunk)`."""
        for (source, target), chunk in zip(self.pairs, self.chunks, strict=True):
            yield source, target, chunk


@dataclasses.dataclass(frozen=True)
class Round:
    """Transfers that run at the same time: all send what they held before the round.

    What arrives is applied in the order of `transfers`.
    """

    transfers: tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A complete collective for `devices` devices; see the module docstring.

    `family` builds the same algorithm for other numbers of devices, where it is known.
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

    All, unless every chunk lies on one device alone: then as many as the device with
    most of them holds.
    """
    if any(len(devices) != 1 for devices in placement):
        return len(placement)
    return max(collections.Counter(placement).values())


def local_row(placement: Placement, chunk: int) -> int:
    """In which row of that buffer a chunk lies: a device's chunks are in order."""
    if local_rows(placement) == len(placement):
        return chunk
    return placement[:chunk].count(placement[chunk])


def holdings(schedule: Schedule) -> Iterator[Holdings]:
    """Yields what every device holds: before the first round, then after each round.

    Entry `[device][chunk]` is the set of devices whose contributions are summed in it.

    Raises:
        ValueError: A transfer is malformed, sends what its source does not hold, counts
            a contribution twice, or mixes complete and partial chunks.
    """
    held = [
        [frozenset([d]) if d in starts else frozenset() for starts in schedule.starts]
        for d in range(schedule.devices)
    ]
    yield tuple(map(tuple, held))
    for round_index, round_ in enumerate(schedule.rounds):
        where = f"{schedule.name}, round {round_index}"
        before = [list(row) for row in held]
        for transfer in round_.transfers:
            _check_transfer(schedule, transfer, where)
            _check_sent(schedule, transfer, before, where)
            for source, target, chunk in transfer:
                sent = before[source][chunk]
                if transfer.op == "add":
                    _check_added(held[target][chunk], sent, target, chunk, where)
                    sent |= held[target][chunk]
                held[target][chunk] = sent
        yield tuple(map(tuple, held))


@functools.lru_cache(maxsize=1024)
def verify(schedule: Schedule) -> Schedule:
    """Proves that every device ends with every contribution exactly once.

    Returns:
        The schedule itself, so that a call can stand around an expression.

    Raises:
        ValueError: Names the round, the device, the chunk and the contribution.
    """
    for name in ("starts", "ends"):
        placement = getattr(schedule, name)
        if len(placement) != schedule.chunks:
            raise ValueError(
                f"{schedule.name} has {schedule.chunks} chunks but places "
                f"{len(placement)} in `{name}`. Give one tuple of devices per chunk."
            )
        strangers = {d for ds in placement for d in ds} - {*range(schedule.devices)}
        if strangers:
            raise ValueError(
                f"{schedule.name} places chunks on devices {sorted(strangers)} in "
                f"`{name}`; devices run from 0 to {schedule.devices - 1}. Choose those."
            )
    *_, held = holdings(schedule)
    for chunk, (starts, ends) in enumerate(
        zip(schedule.starts, schedule.ends, strict=True)
    ):
        for device in ends:
            lacking = sorted(set(starts) - held[device][chunk])
            if lacking:
                raise ValueError(
                    f"{schedule.name}: after the last round ({len(schedule.rounds)} "
                    f"in all) device {device} lacks the contributions of devices "
                    f"{lacking} to chunk {chunk}; it must hold those of "
                    f"{sorted(starts)}. Add transfers that bring them, or remove the "
                    "one that overwrote them."
                )
    return schedule


def simulate(schedule: Schedule, contributions: np.ndarray) -> Iterator[np.ndarray]:
    """Runs a schedule in NumPy: the reference semantics, in the order of additions.

    Args:
        schedule: The schedule to run.
        contributions: `[devices, chunks, ...]`, what each device starts with. Sums are
            made in its dtype.

    Yields:
        `[devices, chunks, ...]`: the buffers before the first round, then after each.
    """
    buffers = np.array(contributions)
    yield buffers.copy()
    for round_ in schedule.rounds:
        before = buffers.copy()
        for transfer in round_.transfers:
            for source, target, chunk in transfer:
                if transfer.op == "add":
                    buffers[target, chunk] += before[source, chunk]
                else:
                    buffers[target, chunk] = before[source, chunk]
        yield buffers.copy()


def _check_transfer(schedule: Schedule, transfer: Transfer, where: str) -> None:
    """Checks ranges and that one `ppermute` can carry the pairs."""
    sources = [source for source, _ in transfer.pairs]
    targets = [target for _, target in transfer.pairs]
    if transfer.op not in ("add", "replace"):
        problem = f"op {transfer.op!r}; it must be 'add' or 'replace'"
    elif not transfer.pairs or len(transfer.pairs) != len(transfer.chunks):
        problem = (
            f"{len(transfer.pairs)} pairs and {len(transfer.chunks)} chunks; it needs "
            "one chunk per pair and at least one pair"
        )
    elif any(not 0 <= d < schedule.devices for d in sources + targets):
        problem = (
            f"pairs {transfer.pairs}; devices run from 0 to {schedule.devices - 1}"
        )
    elif any(not 0 <= c < schedule.chunks for c in transfer.chunks):
        problem = f"chunks {transfer.chunks}; they run from 0 to {schedule.chunks - 1}"
    elif len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        problem = (
            f"pairs {transfer.pairs}; one transfer uses each source and each target "
            "once, so put the others into a transfer of their own in the same round"
        )
    elif any(source == target for source, target in transfer.pairs):
        problem = (
            f"pairs {transfer.pairs}; a device need not send to itself: drop those"
        )
    else:
        return
    raise ValueError(f"{where}: a transfer has {problem}.")


def _check_sent(
    schedule: Schedule,
    transfer: Transfer,
    before: list[list[frozenset[int]]],
    where: str,
) -> None:
    """Checks that sources hold what they send, all complete or all partial."""
    complete = set()
    for source, _, chunk in transfer:
        if not before[source][chunk]:
            raise ValueError(
                f"{where}: device {source} sends chunk {chunk}, which it does not "
                "hold. A device can send what it started with or received in an "
                "earlier round: reorder the rounds or change the chunk."
            )
        complete.add(before[source][chunk] == set(schedule.starts[chunk]))
    if len(complete) > 1:
        raise ValueError(
            f"{where}: the transfer {transfer.pairs} mixes complete chunks with "
            "partial sums, which may travel in different dtypes. Split it into two "
            "transfers of the same round."
        )


def _check_added(
    held: frozenset[int], sent: frozenset[int], target: int, chunk: int, where: str
) -> None:
    """Checks that an addition counts nothing twice and has something to add to."""
    if held & sent:
        raise ValueError(
            f"{where}: device {target} would count the contributions of devices "
            f"{sorted(held & sent)} to chunk {chunk} twice: it holds those of "
            f"{sorted(held)} and receives those of {sorted(sent)}. Send each once, or "
            "use op='replace'."
        )
    if not held:
        raise ValueError(
            f"{where}: device {target} adds to chunk {chunk}, of which it holds "
            "nothing. Use op='replace'."
        )
