"""How long one exchange takes on links of limited bandwidth, predicted.

Hosts of one GPU each, with an Ethernet adapter of 10 Gbit/s and 50 µs: what is sent is
in the schedules that the compiled programs were found to follow.
"""

from collections.abc import Sequence
from typing import Any

from experiments.harness.result import Rows
from experiments.parts import traffic_designs as designs
from experiments.parts.traffic_formulas import FLOAT
from jaxdp import algorithms, targets
from jaxdp.cost import time_s
from jaxdp.schedule import Schedule

NETWORK = "ethernet-10g"
RESNET50 = 25_557_032  # parameters
SMALL = 2_500
RATIO = "1 server / ring"


def schedules(devices: int) -> dict[str, Schedule]:
    """What is compared, on as many devices as it needs."""
    kinds = {
        designs.RING: algorithms.ring(devices),
        designs.ONE_SERVER: algorithms.sharded_servers(devices, 1),
        designs.DOUBLING: algorithms.recursive_doubling(devices),
    }
    if devices >= designs.SERVERS:
        shared = algorithms.sharded_servers(devices, designs.SERVERS)
        kinds[designs.SHARED] = shared
    return kinds


def rows(counts: Sequence[int]) -> Rows:
    """Times by size of the gradient and number of hosts."""
    sizes = {"ResNet-50": RESNET50, f"{SMALL:,} parameters": SMALL}
    return [
        _row(name, elements, devices)
        for name, elements in sizes.items()
        for devices in counts
        if devices > 1
    ]


def _row(name: str, elements: int, devices: int) -> dict[str, Any]:
    hardware = targets.hardware("v100", network_name=NETWORK, devices_per_host=1)
    times = {
        kind: 1e3 * time_s(schedule, elements, FLOAT, hardware)
        for kind, schedule in schedules(devices).items()
    }
    kinds = designs.RING, designs.ONE_SERVER, designs.SHARED, designs.DOUBLING
    return {
        "gradients": name,
        "N": devices,
        **{f"{kind}_ms": times.get(kind) for kind in kinds},
        RATIO: times[designs.ONE_SERVER] / times[designs.RING],
        "label": "predicted: one device a host, 10 Gbit/s and 50 µs from host to host",
    }
