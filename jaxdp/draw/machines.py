"""Hardware that the reader of the step-through page can choose."""

from typing import Any

from jaxdp.targets.chips import NAMES
from jaxdp.targets.hardware import Hardware, Link
from jaxdp.targets.hardware import hardware as figures_of

OWN = "own"  # what the page calls hardware, or a schedule, that has no name here
# Several hosts: devices in each, and what joins the hosts.
NETWORKS = (
    *((4, "infiniband-ndr"), (2, "ethernet-100g")),
    *((1, "infiniband-ndr"), (1, "ethernet-100g"), (1, "ethernet-10g")),
)


def machines(hardware: str | Hardware) -> list[dict[str, Any]]:
    """Hardware that the reader can choose: in one host, and in several."""
    found = {name: figures_of(name) for name in NAMES}
    found["v100-nvlink2"] = figures_of("v100", link_name="nvlink2")
    for inside, network in NETWORKS:
        machine = figures_of("h100", network_name=network, devices_per_host=inside)
        found[f"{inside}-{network}"] = machine
    if isinstance(hardware, Hardware):
        found = {OWN: hardware} | found
    elif hardware not in found:
        figures_of(hardware)  # says which names there are
    return [
        {"id": name, "label": _label(name, machine)} | _figures(machine)
        for name, machine in found.items()
    ]


def _label(name: str, machine: Hardware) -> str:
    """What the list says of some hardware."""
    inside = f"{machine.link.name}, {machine.link.bytes_per_s / 1e9:g} GB/s"
    network = f"{machine.network.name}, {machine.network.bytes_per_s / 1e9:g} GB/s"
    if not name[0].isdigit():
        return f"{machine.name}: {inside}"
    if machine.devices_per_host == 1:
        return f"one device in a host: {network}"
    count = machine.devices_per_host
    return f"{count} {machine.name} in a host: {inside}; {network}"


def _figures(machine: Hardware) -> dict[str, Any]:
    def figures(link: Link) -> dict[str, Any]:
        names = ("name", "bytes_per_s", "alpha_s", "shared")
        return {name: getattr(link, name) for name in names}

    return {
        "devices_per_host": machine.devices_per_host,
        "link": figures(machine.link),
        "network": figures(machine.network),
    }
