"""When and for how long a collective runs, by the alpha-beta model of the links.

A pair of a permute takes alpha + bytes / beta of the link between its two devices; all
pairs go side by side, in both directions. Pairs that leave or enter one host over an
adapter that its devices share take alpha + what crosses that adapter / beta.

XLA leaves the other kinds to a runtime. They take what a ring over the group takes, in
rounds of n neighbours with a chunk each: 2 (n - 1) for an all-reduce and n - 1 for the
others, each as long as its slowest link. Between hosts whose devices have an adapter
each, a ring runs over all of them, up to what the link inside a host carries.
"""

import collections
from collections.abc import Callable

import numpy as np

from jaxdp.program import traffic
from jaxdp.program.collective import CollectiveOp
from jaxdp.program.hlo.groups import Pairs
from jaxdp.targets.hardware import Hardware, Link

# From when each device is free to when it starts and ends; NaN where it takes no part.
Placing = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def pair_seconds(op: CollectiveOp, hardware: Hardware) -> tuple[Pairs, np.ndarray]:
    """The pairs of a permute between different devices, and what each takes."""
    pairs = tuple(pair for pair in op.pairs if pair[0] != pair[1])
    return pairs, _side_by_side(pairs, op.bytes, hardware)


def group_seconds(op: CollectiveOp, hardware: Hardware) -> np.ndarray:
    """What each group of a collective other than a permute takes."""
    rings = [list(zip(g, g[1:] + g[:1], strict=True)) for g in op.groups]
    neighbours = tuple(pair for ring in rings if len(ring) > 1 for pair in ring)
    sent = traffic.sent(op)
    took = []
    shares = _shares(neighbours, hardware) if hardware.network.shared else {}
    for group, ring in zip(op.groups, rings, strict=True):
        rounds = op.ring_passes * (len(group) - 1)
        chunk = max(sent[device] for device in group) / max(rounds, 1)
        slowest = max(
            _ring_link(pair, group, hardware).transfer_s(chunk * shares.get(pair, 1))
            for pair in ring
        )
        took.append(rounds * slowest)
    return np.array(took)


def seconds(op: CollectiveOp, hardware: Hardware) -> float:
    """How long a collective takes from its first start to its last end."""
    if op.kind == "collective-permute":
        _, took = pair_seconds(op, hardware)
    else:
        took = group_seconds(op, hardware)
    return float(took.max(initial=0.0))


def placing(op: CollectiveOp, hardware: Hardware) -> Placing:
    """When the devices of a collective start and end, by when they are free."""
    if op.kind == "collective-permute":
        pairs, took = pair_seconds(op, hardware)
        sources, targets = np.array(pairs, dtype=int).reshape(-1, 2).T
        return lambda free: _place_pairs(free, sources, targets, took)
    took = group_seconds(op, hardware)
    members = [np.array(group) for group in op.groups]
    return lambda free: _place_groups(free, members, took)


def _place_pairs(
    free: np.ndarray, sources: np.ndarray, targets: np.ndarray, took: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each pair when both ends are free; a device in two pairs does both at once."""
    starts = np.maximum(free[sources], free[targets])
    begin, end = np.full_like(free, np.nan), np.full_like(free, np.nan)
    begin[sources], end[sources] = starts, starts + took
    begin[targets] = np.fmin(begin[targets], starts)
    end[targets] = np.fmax(end[targets], starts + took)
    return begin, end


def _place_groups(
    free: np.ndarray, members: list[np.ndarray], took: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each group when all its devices are free."""
    begin, end = np.full_like(free, np.nan), np.full_like(free, np.nan)
    for group, seconds in zip(members, took, strict=True):
        begin[group] = free[group].max()
        end[group] = begin[group] + seconds
    return begin, end


def _side_by_side(pairs: Pairs, size: int, hardware: Hardware) -> np.ndarray:
    shares = _shares(pairs, hardware) if hardware.network.shared else {}
    return np.array(
        [
            hardware.link_between(*pair).transfer_s(size * shares.get(pair, 1))
            for pair in pairs
        ]
    )


def _shares(pairs: Pairs, hardware: Hardware) -> dict[tuple[int, int], int]:
    """How many pairs go over the fuller of the two adapters that a pair goes over."""
    hosts = {pair: (hardware.host(pair[0]), hardware.host(pair[1])) for pair in pairs}
    crossing = {pair: ends for pair, ends in hosts.items() if ends[0] != ends[1]}
    leaving = collections.Counter(source for source, _ in crossing.values())
    entering = collections.Counter(target for _, target in crossing.values())
    return {
        pair: max(leaving[source], entering[target])
        for pair, (source, target) in crossing.items()
    }


def _ring_link(
    pair: tuple[int, int], group: tuple[int, ...], hardware: Hardware
) -> Link:
    """What joins two neighbours of a ring: the adapters of all devices of a host."""
    link = hardware.link_between(*pair)
    hosts = {hardware.host(device) for device in pair}
    if len(hosts) == 1 or link.shared:
        return link
    adapters = min(sum(hardware.host(d) == host for d in group) for host in hosts)
    rate = min(hardware.link.bytes_per_s, adapters * link.bytes_per_s)
    return Link(name=link.name, bytes_per_s=rate, alpha_s=link.alpha_s)
