"""What every device holds while a schedule runs, and what it must not do.

Sets of devices are numbers here, bit `d` for device `d`: 64 devices send thousands of
chunks.
"""

from collections.abc import Iterable, Iterator
from typing import NoReturn

from jaxdp.schedule.data import Schedule, Transfer

Holdings = tuple[tuple[frozenset[int], ...], ...]


def holdings(schedule: Schedule) -> Iterator[Holdings]:
    """Yields what every device holds: before the first round, then after each round.

    Entry `[device][chunk]` is the set of devices whose contributions are summed in it.

    Raises:
        ValueError: A transfer is malformed, sends what its source does not hold, counts
            a contribution twice, or mixes complete and partial chunks.
    """
    checked = masks(schedule)
    held = [[frozenset(members(m)) for m in row] for row in next(checked)]
    yield tuple(map(tuple, held))
    for round_, _ in zip(schedule.rounds, checked, strict=True):
        sent = [
            [held[source][chunk] for source, _, chunk in t] for t in round_.transfers
        ]
        for transfer, moved in zip(round_.transfers, sent, strict=True):
            for (_, target, chunk), arrived in zip(transfer, moved, strict=True):
                kept = held[target][chunk] if transfer.op == "add" else frozenset()
                held[target][chunk] = arrived | kept
        yield tuple(map(tuple, held))


def masks(schedule: Schedule) -> Iterator[list[list[int]]]:
    """As `holdings`, as numbers; yields one table, which the next round changes."""
    held = [[0] * schedule.chunks for _ in range(schedule.devices)]
    for chunk, starts in enumerate(schedule.starts):
        for device in {*starts} & {*range(schedule.devices)}:
            held[device][chunk] = 1 << device
    every = [mask(starts) for starts in schedule.starts]
    yield held
    for round_index, round_ in enumerate(schedule.rounds):
        where = f"{schedule.name}, round {round_index}"
        sent = []  # everything is sent before anything is applied
        for transfer in round_.transfers:
            _check_transfer(schedule, transfer, where)
            sent.append([held[source][chunk] for source, _, chunk in transfer])
            _check_sent(transfer, sent[-1], every, where)
        for transfer, moved in zip(round_.transfers, sent, strict=True):
            _apply(transfer, moved, held, where)
        yield held


def mask(devices: Iterable[int]) -> int:
    """A set of devices as a number."""
    return sum(1 << device for device in {*devices})


def members(held: int) -> list[int]:
    """The devices in such a number, in order."""
    return [device for device in range(held.bit_length()) if held >> device & 1]


def _apply(
    transfer: Transfer, moved: list[int], held: list[list[int]], where: str
) -> None:
    """Adds or stores what arrives."""
    for (_, target, chunk), arrived in zip(transfer, moved, strict=True):
        if transfer.op == "add":
            kept = held[target][chunk]
            if not kept or kept & arrived:
                _refuse_added(kept, arrived, target, chunk, where)
            arrived |= kept
        held[target][chunk] = arrived


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
    transfer: Transfer, moved: list[int], every: list[int], where: str
) -> None:
    """Checks that sources hold what they send, all complete or all partial."""
    complete = set()
    for (source, _, chunk), held in zip(transfer, moved, strict=True):
        if not held:
            raise ValueError(
                f"{where}: device {source} sends chunk {chunk}, which it does not "
                "hold. A device can send what it started with or received in an "
                "earlier round: reorder the rounds or change the chunk."
            )
        complete.add(held == every[chunk])
    if len(complete) > 1:
        raise ValueError(
            f"{where}: the transfer {transfer.pairs} mixes complete chunks with "
            "partial sums, which may travel in different dtypes. Split it into two "
            "transfers of the same round."
        )


def _refuse_added(
    kept: int, arrived: int, target: int, chunk: int, where: str
) -> NoReturn:
    """An addition counts nothing twice and has something to add to."""
    if not kept:
        raise ValueError(
            f"{where}: device {target} adds to chunk {chunk}, of which it holds "
            "nothing. Use op='replace'."
        )
    raise ValueError(
        f"{where}: device {target} would count the contributions of devices "
        f"{members(kept & arrived)} to chunk {chunk} twice: it holds those of "
        f"{members(kept)} and receives those of {members(arrived)}. Send each once, or "
        "use op='replace'."
    )
