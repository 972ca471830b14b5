"""The hardware that steps are priced on: chips, and what joins them."""

import dataclasses
from collections.abc import Mapping

from jaxdp import targets
from jaxdp.targets import Hardware

PCIE, NVLINK = "V100, PCIe", "H100, NVLink"
HOSTS = (PCIE, NVLINK)  # of 8 devices, by what joins those
ONE = "1 a host"
DESCRIBED = {
    PCIE: "8 a host, Ethernet of 10 Gbit/s between hosts",
    NVLINK: "8 a host, InfiniBand of 400 Gbit/s for each",
    "100G, 8 a host": "H100 with NVLink; one Ethernet adapter a host",
    "10G, 8 a host": "H100 with NVLink; one Ethernet adapter a host",
    "100G, 1 a host": "H100, Ethernet between any two",
    "10G, 1 a host": "H100, Ethernet between any two",
}


def machines() -> Mapping[str, Hardware]:
    """All, by name."""
    found = {PCIE: _v100(), NVLINK: targets.hardware("h100")}
    for count in (8, 1):
        for gbit in (100, 10):
            found[f"{gbit}G, {count} a host"] = targets.hardware(
                "h100", network_name=f"ethernet-{gbit}g", devices_per_host=count
            )
    return found


def hosted(name: str) -> int:
    """How many devices a host has, and `nn.DataParallel` at most."""
    return 1 if name.endswith(ONE) else 8


def _v100() -> Hardware:
    """In 16 bits it computes in float16: it has no fast bfloat16, of the same bytes."""
    given = targets.hardware("v100")
    rates = dict(given.flops_per_s)
    rates["bf16"] = rates["f16"]
    return dataclasses.replace(given, flops_per_s=tuple(rates.items()))
