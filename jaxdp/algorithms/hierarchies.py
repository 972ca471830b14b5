"""Rings in hosts, and rings across them: slow links carry what their number demands.

Ranks are row-major: D = N / H devices in each of H hosts, and rank h D + i is device i
of host h. A ring through all hosts sends each of its 2 (N - 1) rounds over the network.
This one sends 2 (H - 1), and every device of a host carries a part of its own:

    reduce-scatter   rings of D devices in each host     device i: block i, of its host
    all-reduce       rings of H, one for each i          device i: block i, complete
    all-gather       rings of D devices in each host     every device: all blocks

A block is K / D bytes, cut into H chunks for the second ring.
"""

from jaxdp.algorithms.building import blocks, everywhere, for_any_devices
from jaxdp.schedule import Round, Schedule, Transfer


@for_any_devices
def hierarchical(devices: int, hosts: int) -> Schedule:
    """Ring reduce-scatter inside hosts, ring all-reduce across, ring all-gather inside.

    Cost: 2 (D - 1) + 2 (H - 1) rounds; 2 (N - 1) K / N bytes sent and received per
    device, of them 2 (H - 1) K / N to another host.

    Args:
        devices: N.
        hosts: H, a divisor of N.

    Raises:
        ValueError: The devices do not make so many equal hosts.

    References:
        Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision:
        Training ImageNet in Four Minutes", arXiv 1807.11205, 2018: a hierarchy, with
        one device of each host in the ring across. Mikami et al., "Massively
        Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233,
        2018: all of them, in "2D-Torus all-reduce".
    """
    inside = _devices_per_host(devices, hosts)
    across_add = [_across(inside, hosts, s, 1, "add") for s in range(hosts - 1)]
    across_replace = [_across(inside, hosts, s, 0, "replace") for s in range(hosts - 1)]
    rounds = (
        *(_inside(inside, hosts, s, 1, "add") for s in range(inside - 1)),
        *across_add,
        *across_replace,
        *(_inside(inside, hosts, s, 0, "replace") for s in range(inside - 1)),
    )
    all_ = everywhere(devices, devices)
    name = f"hierarchical({devices}, hosts={hosts})"
    return Schedule(name, devices, devices, all_, all_, rounds)


def _devices_per_host(devices: int, hosts: int) -> int:
    """D, the devices of a host."""
    if hosts < 1 or devices % hosts:
        fitting = [h for h in range(1, devices + 1) if devices % h == 0]
        raise ValueError(
            f"hierarchical got hosts={hosts} for {devices} devices. Hosts have equally "
            f"many devices: hosts must divide {devices}, which leaves "
            f"{devices % hosts if hosts > 0 else devices}. Use one of "
            f"{', '.join(map(str, fitting))}, or another number of devices."
        )
    return devices // hosts


def _inside(inside: int, hosts: int, s: int, behind: int, op) -> Round:
    """A ring round in every host: device i sends block `i - behind - s`."""
    pairs = [
        (h * inside + i, h * inside + (i + 1) % inside)
        for h in range(hosts)
        for i in range(inside)
    ]
    firsts = [
        (i - behind - s) % inside * hosts for _ in range(hosts) for i in range(inside)
    ]
    return blocks(pairs, firsts, hosts, op)


def _across(inside: int, hosts: int, s: int, behind: int, op) -> Round:
    """A ring round across: device i of host h sends `h - behind - s` of block i."""
    pairs = tuple(
        (h * inside + i, (h + 1) % hosts * inside + i)
        for h in range(hosts)
        for i in range(inside)
    )
    chunks = tuple(
        i * hosts + (h - behind - s) % hosts
        for h in range(hosts)
        for i in range(inside)
    )
    return Round((Transfer(pairs, chunks, op),))
