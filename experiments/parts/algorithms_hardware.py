"""Four kinds of hardware that differ in what joins devices, and hosts."""

from collections.abc import Mapping

from experiments.harness.result import Rows
from jaxdp import targets
from jaxdp.targets import Hardware

NVLINK, INFINIBAND = "H100, one NVLink domain", "H100, hosts of 8"
PCIE, ETHERNET = "V100, hosts of 8", "Ethernet, a device each"
DESCRIBED = {
    NVLINK: "NVLink of 450 GB/s between any two",
    INFINIBAND: "NVLink; InfiniBand of 400 Gbit/s for each device between hosts",
    PCIE: "PCIe 3.0; one Ethernet adapter of 10 Gbit/s for all 8 between hosts",
    ETHERNET: "10 Gbit/s between any two",
}
MOST = 64  # devices


def machines() -> Mapping[str, Hardware]:
    """All, by name."""
    return {
        NVLINK: targets.hardware("h100", devices_per_host=MOST),
        INFINIBAND: targets.hardware("h100"),
        PCIE: targets.hardware("v100"),
        ETHERNET: targets.hardware(
            "v100", network_name="ethernet-10g", devices_per_host=1
        ),
    }


def rows() -> Rows:
    """What joins devices, and hosts."""
    return [
        {
            "hardware": name,
            "in a host": "" if machine.devices_per_host == 1 else machine.link.name,
            "between hosts": ""
            if machine.devices_per_host == MOST
            else machine.network.name,
            "devices in a host": machine.devices_per_host,
            "what that is": DESCRIBED[name],
        }
        for name, machine in machines().items()
    ]
