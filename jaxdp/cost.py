"""What a schedule costs: rounds, bytes by device and link, seconds on some hardware.

Bytes are exact: the compiled program sends the same. Seconds are those of the
alpha-beta model (Hockney, "The communication challenge for MPP", Parallel Computing
1994): `m` bytes take alpha + m / beta on the link between two devices.

The buffer is padded to whole chunks: `elements` of `itemsize` bytes in `C` chunks
travel as chunks of ceil(elements / C) elements.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxdp.schedule import Pairs, Schedule, bundles
from jaxdp.targets.hardware import Hardware, hardware


class Cost(NamedTuple):
    """What one run of a schedule moves.

    Attributes:
        rounds: How many rounds follow each other.
        sent_bytes: By each device.
        received_bytes: By each device.
        link_bytes: By (source, target), of the links that carry anything.
    """

    rounds: int
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    link_bytes: Mapping[tuple[int, int], int]


def cost(
    schedule: Schedule,
    elements: int,
    itemsize: int,
    partial_itemsize: int | None = None,
) -> Cost:
    """Counts the rounds of a schedule, and the bytes it moves.

    Args:
        schedule: Such as `jaxdp.algorithms.ring(8)`; verified.
        elements: Length of the whole buffer, before it is padded.
        itemsize: Bytes an element takes on the wire.
        partial_itemsize: Bytes an element of a partial sum takes, where that is another
            number: sums of 16-bit floats travel as float32 until they are complete.

    Returns:
        Rounds, and bytes by device and by link.

    Raises:
        ValueError: A negative number of elements, or elements of no bytes.

    Example:
        >>> from jaxdp.algorithms import ring
        >>> cost(ring(8), elements=1000, itemsize=4).sent_bytes[0]
        7000
        >>> cost(ring(8), elements=1000, itemsize=2, partial_itemsize=4).sent_bytes[0]
        5000
    """
    moved: Counter[Pairs] = Counter()  # rounds of a ring all have the same pairs
    for round_ in _rounds(schedule, elements, itemsize, partial_itemsize):
        for pairs, size_bytes in round_:
            moved[pairs] += size_bytes
    links: Counter[tuple[int, int]] = Counter()
    for pairs, size_bytes in moved.items():
        links.update(dict.fromkeys(pairs, size_bytes))
    sent, received = Counter(), Counter()
    for (source, target), size_bytes in links.items():
        sent[source] += size_bytes
        received[target] += size_bytes
    devices = range(schedule.devices)
    return Cost(
        rounds=len(schedule.rounds),
        sent_bytes=tuple(sent[device] for device in devices),
        received_bytes=tuple(received[device] for device in devices),
        link_bytes=dict(sorted(links.items())),
    )


def time_s(
    schedule: Schedule,
    elements: int,
    itemsize: int,
    hardware: Hardware | str,
    partial_itemsize: int | None = None,
) -> float:
    """Predicts how long a schedule takes.

    Rounds follow each other. In a round a device takes part in one bundle after the
    other (`jaxdp.schedule.Bundle`: a transfer, or several along the same pairs, which
    wait for one alpha), and the round ends with the device that needs longest. Links
    carry both directions at once, so what a device sends and receives in one bundle
    costs it the longer of both. Where a host has one network adapter (`Link.shared`),
    the pairs of a bundle that pass it share its bandwidth, direction by direction.

    A schedule gives the bundles of a round no order. A program has one, and there a
    device may wait for a partner that is busy, or start a round before others are done
    with the last: where a round has several bundles over different links, or several
    dedicated servers, `ProgramReport.timeline` differs, and is right for the program.

    Args:
        schedule: What runs; verified.
        elements: Length of the whole buffer, before it is padded.
        itemsize: Bytes an element takes on the wire.
        hardware: What runs it, or the name of a target, such as `"h100"`.
        partial_itemsize: As in `cost`.

    Returns:
        Seconds.

    Raises:
        ValueError: As `cost`; or an unknown target.

    Example:
        >>> from jaxdp.algorithms import ring, star
        >>> ring_s, star_s = (time_s(f(8), 2**26, 4, "h100") for f in (ring, star))
        >>> star_s > 3 * ring_s
        True
    """
    machine = _hardware(hardware)
    # All rounds of a ring have the same pairs: 2,046 of 1,024 pairs with 1,024 devices.
    alike = Counter(map(tuple, _rounds(schedule, elements, itemsize, partial_itemsize)))
    return sum(times * _round_s(each, machine) for each, times in alike.items())


def native_s(
    kind: str, elements: int, itemsize: int, devices: int, hardware: Hardware | str
) -> float:
    """Predicts how long a collective of XLA's takes, which the runtime runs as a ring.

    Devices are in the order of their hosts. Where each has a network adapter, rings go
    side by side and use all of them.

    Args:
        kind: As in HLO: "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or
            "collective-broadcast".
        elements: What each device puts in.
        itemsize: Bytes an element takes on the wire.
        devices: How many take part.
        hardware: What runs it, or the name of a target.

    Returns:
        Seconds.

    References:
        NVIDIA, nccl-tests, "Performance": the bytes of each kind.
    """
    machine = _hardware(hardware)
    if devices < 2:
        return 0.0
    whole = elements * devices if kind == "all-gather" else elements
    rounds = (devices - 1) * (2 if kind == "all-reduce" else 1)
    chunk_bytes = -(-whole // devices) * itemsize
    link = machine.link
    alpha_s, rate = link.alpha_s, link.bytes_per_s
    if devices > machine.devices_per_host:
        network = machine.network
        adapters = 1 if network.shared else machine.devices_per_host
        alpha_s = max(alpha_s, network.alpha_s)
        rate = min(rate, adapters * network.bytes_per_s)
    return rounds * (alpha_s + chunk_bytes / rate)


_hardware = hardware  # `time_s` has an argument of that name


def _rounds(
    schedule: Schedule, elements: int, itemsize: int, partial_itemsize: int | None
) -> Iterator[list[tuple[Pairs, int]]]:
    """The bundles of each round: their pairs, and the bytes of each pair."""
    smallest = min(itemsize, partial_itemsize or itemsize)
    if elements < 0 or smallest < 1:
        raise ValueError(
            f"cost got elements={elements} of itemsize={smallest} bytes for "
            f"{schedule.name}. It needs at least 0 elements of at least 1 byte. Give "
            "the length of the buffer and the bytes an element takes on the wire."
        )
    length = -(-elements // schedule.chunks)
    widths = {"own": itemsize, "complete": itemsize}
    widths["partial"] = partial_itemsize or itemsize
    for round_ in bundles(schedule):
        counted = [(each, len(each.transfers) * length) for each in round_]
        yield [(each.pairs, count * widths[each.kind]) for each, count in counted]


def _round_s(bundles_: tuple[tuple[Pairs, int], ...], machine: Hardware) -> float:
    """How long the device needs that needs longest."""
    busy_s: dict[int, float] = {}
    for pairs, size_bytes in bundles_:
        for device, seconds in _bundle_s(pairs, size_bytes, machine).items():
            busy_s[device] = busy_s.get(device, 0.0) + seconds
    return max(busy_s.values(), default=0.0)


def _bundle_s(pairs: Pairs, size_bytes: int, machine: Hardware) -> dict[int, float]:
    """How long each device is busy with one bundle."""
    leaving, entering = Counter(), Counter()  # pairs that pass a host's adapter
    for source, target in pairs:
        if machine.host(source) != machine.host(target):
            leaving[machine.host(source)] += 1
            entering[machine.host(target)] += 1
    busy_s: dict[int, float] = {}
    for source, target in pairs:
        link, sharing = machine.link_between(source, target), 1
        if link.shared and machine.host(source) != machine.host(target):
            sharing = max(leaving[machine.host(source)], entering[machine.host(target)])
        seconds = link.transfer_s(sharing * size_bytes)
        for device in (source, target):
            busy_s[device] = max(busy_s.get(device, 0.0), seconds)
    return busy_s
