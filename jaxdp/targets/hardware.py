"""How fast devices compute and what joins them: the figures behind predicted times.

Compute is a roofline: a kernel takes what its FLOPs or its bytes take, whichever is
longer (Williams, Waterman and Patterson, CACM 2009). A transfer takes alpha + bytes /
beta on its link, and both ends are busy for as long (Hockney, Parallel Computing 1994).

Published peaks are never reached, so each is multiplied by an efficiency: assumptions,
written down here, until `make gpu-check` has measured them.
"""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping

from jaxdp.targets.chips import DATA, chip

MATMUL_EFFICIENCY = 0.5  # of the peak FLOP/s, in good matrix multiplications
MEMORY_EFFICIENCY = 0.9  # of the peak bandwidth, in kernels that stream
LAUNCH_S = 2e-6  # the least time between the starts of two kernels
# What XLA computes in where the chip has no peak for a type, or JAX asks for another.
_COMPUTED_AS = {"f32": "tf32", "s16": "s8", "u8": "s8", "s32": "f32", "c64": "f32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What joins two devices.

    Attributes:
        name: As in `links.toml`.
        bytes_per_s: Beta, in each direction.
        alpha_s: Alpha, what a transfer takes besides its bytes.
        shared: Whether all devices of a host share one, as an Ethernet adapter.
    """

    name: str
    bytes_per_s: float
    alpha_s: float
    shared: bool = False

    def transfer_s(self, size_bytes: float) -> float:
        """How long a transfer takes."""
        return self.alpha_s + size_bytes / self.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Devices of one kind in hosts of equal size.

    Device numbers are logical, as in compiled programs; `devices_per_host` of them in a
    row share a host.

    Attributes:
        name: For tables and figures.
        flops_per_s: Reached in matrix multiplications, by element type.
        memory_bytes_per_s: Reached by kernels that read and write.
        memory_bytes: Of one device.
        link: What joins devices of a host.
        network: What joins hosts.
        devices_per_host: How many devices a host has.
        launch_s: No kernel takes less.
        target: What `compile_for` calls the chip; "" if it cannot.
    """

    name: str
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    memory_bytes: int
    link: Link
    network: Link
    devices_per_host: int
    launch_s: float = LAUNCH_S
    target: str = ""

    def flops_of(self, dtype: str) -> float:
        """FLOP/s of matrix multiplications whose operands have an element type."""
        known = dict(self.flops_per_s)
        dtype = "f8" if dtype.startswith("f8") else dtype  # f8e4m3fn, f8e5m2, ...
        for name in (_COMPUTED_AS.get(dtype, dtype), dtype):
            if name in known:
                return known[name]
        return known["f32"]

    def kernel_s(self, flops: Mapping[str, int], size_bytes: float) -> float:
        """How long a kernel takes.

        Args:
            flops: Of its matrix multiplications, by element type.
            size_bytes: What it reads and writes.
        """
        compute_s = sum(count / self.flops_of(dtype) for dtype, count in flops.items())
        return max(self.launch_s, compute_s, size_bytes / self.memory_bytes_per_s)

    def host(self, device: int) -> int:
        """The host of a device."""
        return device // self.devices_per_host

    def link_between(self, source: int, target: int) -> Link:
        """What joins two devices: the host's link, or the network between hosts.

        Args:
            source: Rank of one device.
            target: Rank of the other.
        """
        same = self.host(source) == self.host(target)
        return self.link if same else self.network


@functools.cache
def link(name: str) -> Link:
    """A link of `links.toml`.

    Raises:
        ValueError: There is none of that name; lists those that there are.
    """
    known = tomllib.loads((DATA / "links.toml").read_text(encoding="utf-8"))
    if name not in known:
        raise ValueError(
            f"link got {name!r}. It must be one of {', '.join(known)}. Choose one, or "
            "make a jaxdp.targets.Link of your own."
        )
    return Link(name=name, **known[name])


def hardware(
    target: "str | Hardware",
    *,
    link_name: str | None = None,
    network_name: str | None = None,
    devices_per_host: int | None = None,
) -> Hardware:
    """The figures of a target, as its data sheet and usual servers have them.

    Args:
        target: Such as "h100"; a `Hardware` is given back as it is.
        link_name: Another link inside a host, such as "pcie3".
        network_name: Another network, such as "ethernet-100g".
        devices_per_host: Another size of a host.

    Raises:
        ValueError: An unknown name; lists the known ones.

    Example:
        >>> hardware("h100").link.bytes_per_s
        450000000000.0
    """
    if isinstance(target, Hardware):
        return target
    about = chip(target)
    reached = {t: MATMUL_EFFICIENCY * peak for t, peak in about.flops_per_s.items()}
    return Hardware(
        name=about.name,
        flops_per_s=tuple(reached.items()),
        memory_bytes_per_s=MEMORY_EFFICIENCY * about.memory_bytes_per_s,
        memory_bytes=about.memory_bytes,
        link=link(link_name or about.link),
        network=link(network_name or about.network),
        devices_per_host=devices_per_host or about.devices_per_host,
        # A TPU is given a whole program; a GPU one kernel after the other.
        launch_s=LAUNCH_S if about.backend == "cuda" else 0.0,
        target=target,
    )
