"""What the collectives of a step take on the links between hosts of equal size."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from jaxdp.cost import native_s, time_s
from jaxdp.program.sized import SizedCollective
from jaxdp.targets import Hardware


def spread(machine: Hardware, devices: int, hosts: int | None) -> Hardware:
    """The hardware with its devices in so many hosts, or in as few as it takes.

    Raises:
        ValueError: They do not divide into hosts.
    """
    count = hosts or max(1, math.ceil(devices / machine.devices_per_host))
    if devices % count:
        raise ValueError(
            f"predict got {devices} devices in {count} hosts. All hosts have equally "
            f"many: {devices} is no multiple of {count}. Use "
            f"{math.ceil(devices / count) * count} devices, or hosts of another size."
        )
    return replace(machine, devices_per_host=devices // count)


def communication_s(
    sent: Sequence[SizedCollective], devices: int, machine: Hardware
) -> float:
    """Seconds that collectives take on some devices, one after the other.

    Raises:
        ValueError: A schedule that exists for its own devices alone.
    """
    return sum(one.count * _once_s(one, devices, machine) for one in sent)


@functools.lru_cache(maxsize=4096)
def _once_s(one: SizedCollective, devices: int, machine: Hardware) -> float:
    """Seconds of one run of a collective."""
    if one.schedule is None:
        return native_s(one.kind, one.elements, one.itemsize, devices, machine)
    one = one.resized(devices)
    assert one.schedule is not None
    return time_s(
        one.schedule,
        one.padded_elements,
        one.itemsize,
        machine,
        one.partial_itemsize,
    )
