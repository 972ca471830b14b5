"""Stars: everything goes through one root.

This is `nn.DataParallel`'s pattern and the simplest parameter server. The root's link
carries (N - 1) K in and (N - 1) K out.
"""

from jaxdp.algorithms.building import (
    backwards,
    checked_chunks,
    everywhere,
    for_any_devices,
    one_each,
    one_round,
    overlapped,
)
from jaxdp.schedule import Schedule, Transfer

CHUNKS = 4  # in flight by default: both directions idle for a fifth of the rounds


@for_any_devices
def star_reduce(devices: int, root: int = 0) -> Schedule:
    """Every device sends its whole buffer to the root, which adds them to its own.

    It adds in rank order.

    Cost: 1 round; the root receives (N - 1) K bytes, the others send K each.
    """
    others = [d for d in range(devices) if d != root]
    sends = [Transfer(((source, root),), (0,), "add") for source in others]
    name = f"star_reduce({devices}, root={root})"
    starts, ends = everywhere(devices, 1), ((root,),)
    return Schedule(name, devices, 1, starts, ends, one_round(sends))


@for_any_devices
def star_broadcast(devices: int, root: int = 0) -> Schedule:
    """The root sends its whole buffer to every other device.

    Cost: 1 round; the root sends (N - 1) K bytes, the others receive K each.
    """
    others = [d for d in range(devices) if d != root]
    sends = [Transfer(((root, target),), (0,), "replace") for target in others]
    name = f"star_broadcast({devices}, root={root})"
    starts, ends = ((root,),), everywhere(devices, 1)
    return Schedule(name, devices, 1, starts, ends, one_round(sends))


@for_any_devices
def star(devices: int, root: int = 0) -> Schedule:
    """Star all-reduce: `star_reduce` to the root, then `star_broadcast` from it.

    Cost: 2 rounds; the root receives (N - 1) K bytes and sends as many, the others K.
    """
    reduced = star_reduce(devices, root)
    name = f"star({devices}, root={root})"
    return reduced.then(star_broadcast(devices, root), name)


@for_any_devices
def star_gather(devices: int, root: int = 0) -> Schedule:
    """Device `r` sends chunk `r`, all it has, to the root.

    Cost: 1 round; the root receives (N - 1) K / N bytes, the others send K / N each.
    """
    others = [d for d in range(devices) if d != root]
    sends = [Transfer(((source, root),), (source,), "replace") for source in others]
    name = f"star_gather({devices}, root={root})"
    starts, ends = one_each(devices), ((root,),) * devices
    return Schedule(name, devices, devices, starts, ends, one_round(sends))


@for_any_devices
def star_scatter(devices: int, root: int = 0) -> Schedule:
    """The root sends chunk `r` to device `r`.

    Cost: 1 round; the root sends (N - 1) K / N bytes, the others receive K / N each.
    """
    others = [d for d in range(devices) if d != root]
    sends = [Transfer(((root, target),), (target,), "replace") for target in others]
    name = f"star_scatter({devices}, root={root})"
    starts, ends = ((root,),) * devices, one_each(devices)
    return Schedule(name, devices, devices, starts, ends, one_round(sends))


@for_any_devices
def pipelined_star(devices: int, root: int = 0, chunks: int = CHUNKS) -> Schedule:
    """As `star`, chunk after chunk: the root sends one while it receives the next.

    Where a device does one transfer after the other, this is no quicker than the star;
    it is where both directions of the root's link run at once.

    Cost: C + 1 rounds of up to 2 (N - 1) transfers; the bytes of the star, in C chunks
    of K / C.

    Args:
        devices: N.
        root: Rank in the middle.
        chunks: C; more overlap better, but every one has its own latency.
    """
    name = f"pipelined_star({devices}, root={root}, chunks={chunks})"
    middle = ((root,),) * checked_chunks(name, chunks)
    all_ = everywhere(devices, chunks)
    others = [d for d in range(devices) if d != root]
    rounds = [
        round_
        for chunk in range(chunks)
        for round_ in one_round(
            [Transfer(((root, d),), (chunk,), "replace") for d in others]
        )
    ]
    spread = Schedule(name, devices, chunks, middle, all_, tuple(rounds))
    return overlapped(backwards(spread, name), spread, delay=1, name=name)
