"""Ways to sum Φ bytes over N hosts, and how long their links need at least.

Link bytes have headers: at an MTU of 1,500, 1,448 of the 1,514 bytes of a packet are
payload. So nothing can come closer to these bounds than 1.046 times; `HEADERS` says it.
"""

import dataclasses
import math
from typing import Any

from jaxdp import algorithms, cost, targets
from jaxdp.schedule import Schedule

STAR, RING, DOUBLING = "star", "ring", "recursive doubling"
PSUM, TORCH, PERMUTE = "native psum", "torch all_reduce", "bare ppermute"
ETHERNET, IP_AND_TCP = 14, 52  # bytes of headers: TCP with timestamps
ITEM = 4  # bytes of a float32
BUCKET_MB = 16.0  # what our rounds move at once, as in training


def servers(count: int) -> str:
    """The name of several parameter servers."""
    return f"{count} servers"


def names(devices: int, torch: bool) -> list[str]:
    """All ways to be compared.

    Args:
        devices: N; all of them and half of them serve.
        torch: Whether PyTorch is installed.
    """
    several = [servers(count) for count in sorted({2, devices})]
    rivals = [TORCH] if torch else []
    return [STAR, *several, DOUBLING, RING, PSUM, *rivals, PERMUTE]


def schedule(name: str, devices: int) -> Schedule | None:
    """What our executor runs; None for the ways of others."""
    if name.endswith(" servers"):
        return algorithms.sharded_servers(devices, int(name.split()[0]))
    named = {
        STAR: algorithms.star,
        RING: algorithms.ring,
        DOUBLING: algorithms.recursive_doubling,
    }
    return named[name](devices) if name in named else None


def buckets(buffer: Any) -> list[Any]:
    """A buffer cut into equal parts of at most `BUCKET_MB`, as near as may be.

    A second bucket finds the memory of the first in the cache, and a ring of 64 MiB
    took 2 % longer in one piece.
    """
    count = math.ceil(buffer.size * ITEM / 2**20 / BUCKET_MB)
    return [buffer] if buffer.size % count else [*buffer.reshape(count, -1)]


def bound_s(name: str, devices: int, size_mb: float, bytes_per_s: float) -> float:
    """How long the busiest link takes for its bytes, if it never idles.

    Of others' all-reduces nobody here says what they send: the bound is the ring's, as
    no all-reduce can send less. A bare permute sends the buffer once.

    Args:
        name: One of `names`.
        devices: N.
        size_mb: Φ in MiB.
        bytes_per_s: What each link carries in each direction, both at once.
    """
    elements = elements_of(size_mb)
    if name == PERMUTE:
        return elements * ITEM / bytes_per_s
    steps = schedule(name, devices) or algorithms.ring(devices)
    return cost.time_s(steps, elements, ITEM, _links(devices, bytes_per_s))


def elements_of(size_mb: float) -> int:
    """How many float32 fill so many MiB."""
    return round(size_mb * 2**20 / ITEM)


def overhead(mtu: int) -> float:
    """Link bytes over payload bytes, for packets of that size."""
    return (mtu + ETHERNET) / (mtu - IP_AND_TCP)


def _links(devices: int, bytes_per_s: float) -> targets.Hardware:
    """Hosts whose links have a rate and no latency."""
    link = targets.Link(name="limited", bytes_per_s=bytes_per_s, alpha_s=0.0)
    like = targets.hardware("h100", devices_per_host=devices)
    return dataclasses.replace(like, link=link)
