"""Rings: every device sends to its neighbours only.

The ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 2009, section 3) cuts the buffer into N chunks. N = 4,
reduce-scatter, chunk sent by each device:

    round   device 0   device 1   device 2   device 3
      0        3          0          1          2
      1        2          3          0          1
      2        1          2          3          0
    owns       0          1          2          3      (complete after the last round)

A bidirectional ring uses the links to both neighbours: what a chunk collects comes from
both sides, half of it from each, and complete chunks go half-way round both ways. Where
the two links of a device are two, as in a torus, each round moves twice as much. Where
a device has one link, its two transfers share it, and a round takes twice as long.
"""

import functools
from collections.abc import Callable, Sequence

from jaxdp.algorithms.building import everywhere, for_any_devices, one_each
from jaxdp.schedule import Pairs, Round, Schedule, Transfer


@for_any_devices
def ring_reduce_scatter(devices: int) -> Schedule:
    """Ring reduce-scatter: device `r` ends with the complete chunk `r`.

    In round `s` device `r` sends chunk `r - 1 - s`; its neighbour `r + 1` adds it.

    Cost: N - 1 rounds; (N - 1) K / N bytes sent and received per device.
    """
    rounds = tuple(
        Round((_shift(devices, lambda r, s=s: r - 1 - s, "add"),))
        for s in range(devices - 1)
    )
    name = f"ring_reduce_scatter({devices})"
    starts, ends = everywhere(devices, devices), one_each(devices)
    return Schedule(name, devices, devices, starts, ends, rounds)


@for_any_devices
def ring_all_gather(devices: int) -> Schedule:
    """Ring all-gather: device `r` starts with chunk `r`, every device ends with all.

    In round `s` device `r` sends chunk `r - s`; its neighbour `r + 1` stores it.

    Cost: N - 1 rounds; (N - 1) K / N bytes sent and received per device.
    """
    rounds = tuple(
        Round((_shift(devices, lambda r, s=s: r - s, "replace"),))
        for s in range(devices - 1)
    )
    name = f"ring_all_gather({devices})"
    starts, ends = one_each(devices), everywhere(devices, devices)
    return Schedule(name, devices, devices, starts, ends, rounds)


@for_any_devices
def ring(devices: int) -> Schedule:
    """Ring all-reduce: `ring_reduce_scatter`, then `ring_all_gather`.

    Cost: 2 (N - 1) rounds; 2 (N - 1) K / N bytes sent and received per device.
    """
    scattered = ring_reduce_scatter(devices)
    return scattered.then(ring_all_gather(devices), f"ring({devices})")


@for_any_devices
def bidirectional_ring_reduce_scatter(devices: int) -> Schedule:
    """As `ring_reduce_scatter`, with half of the contributions from each side.

    In round `s` device `r` sends chunk `r + floor(N / 2) - s` to `r + 1`, and chunk
    `r - floor((N - 1) / 2) + s` to `r - 1`; both add what they get.

    Cost: floor(N / 2) rounds; (N - 1) K / N bytes sent and received per device, of them
    floor(N / 2) K / N to the right.
    """
    right, left = devices // 2, (devices - 1) // 2
    rounds = _both_ways(
        [_shift(devices, lambda r, s=s: r + right - s, "add") for s in range(right)],
        [_shift(devices, lambda r, s=s: r - left + s, "add", -1) for s in range(left)],
    )
    name = f"bidirectional_ring_reduce_scatter({devices})"
    starts, ends = everywhere(devices, devices), one_each(devices)
    return Schedule(name, devices, devices, starts, ends, rounds)


@for_any_devices
def bidirectional_ring_all_gather(devices: int) -> Schedule:
    """As `ring_all_gather`, with every chunk half-way round both ways.

    In round `s` device `r` sends chunk `r - s` to `r + 1` and chunk `r + s` to `r - 1`.

    Cost: floor(N / 2) rounds; (N - 1) K / N bytes sent and received per device, of them
    floor(N / 2) K / N to the right.
    """
    right, left = devices // 2, (devices - 1) // 2
    rounds = _both_ways(
        [_shift(devices, lambda r, s=s: r - s, "replace") for s in range(right)],
        [_shift(devices, lambda r, s=s: r + s, "replace", -1) for s in range(left)],
    )
    name = f"bidirectional_ring_all_gather({devices})"
    starts, ends = one_each(devices), everywhere(devices, devices)
    return Schedule(name, devices, devices, starts, ends, rounds)


@for_any_devices
def bidirectional_ring(devices: int) -> Schedule:
    """All-reduce by both bidirectional halves: the ring's bytes in half its rounds.

    Cost: 2 floor(N / 2) rounds of two transfers each, but one if N is even and the
    round is the last of its half; 2 (N - 1) K / N bytes sent and received per device.

    References:
        Google DeepMind, "How to Scale Your Model", "Sharded Matrices and How to
        Multiply Them", 2025: the bidirectional all-gather.
    """
    scattered = bidirectional_ring_reduce_scatter(devices)
    gathered = bidirectional_ring_all_gather(devices)
    return scattered.then(gathered, f"bidirectional_ring({devices})")


def _shift(
    devices: int, chunk_of: Callable[[int], int], op, towards: int = 1
) -> Transfer:
    """Device `r` sends chunk `chunk_of(r)` to its neighbour `r + towards`."""
    chunks = tuple(chunk_of(r) % devices for r in range(devices))
    return Transfer(_neighbours(devices, towards), chunks, op)


@functools.lru_cache(maxsize=128)
def _neighbours(devices: int, towards: int) -> Pairs:
    """Every device with a neighbour; the same tuple for all rounds of a ring."""
    return tuple((r, (r + towards) % devices) for r in range(devices))


def _both_ways(
    right: Sequence[Transfer], left: Sequence[Transfer]
) -> tuple[Round, ...]:
    """Rounds of one transfer to the right and one to the left, while there is one."""
    return tuple(Round((sent, *left[s : s + 1])) for s, sent in enumerate(right))
