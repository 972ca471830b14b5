"""Algorithms by name."""

import functools
import math
from collections.abc import Callable

from jaxdp.algorithms.double_trees import double_binary_tree
from jaxdp.algorithms.doubling import halving_doubling, recursive_doubling
from jaxdp.algorithms.exchanges import (
    direct,
    direct_all_gather,
    direct_reduce_scatter,
)
from jaxdp.algorithms.hierarchies import hierarchical
from jaxdp.algorithms.rings import (
    bidirectional_ring,
    bidirectional_ring_all_gather,
    bidirectional_ring_reduce_scatter,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)
from jaxdp.algorithms.stars import (
    pipelined_star,
    star,
    star_broadcast,
    star_gather,
    star_reduce,
    star_scatter,
)
from jaxdp.algorithms.trees import (
    pipelined_tree,
    pipelined_tree_broadcast,
    pipelined_tree_reduce,
    tree,
    tree_broadcast,
    tree_reduce,
)
from jaxdp.schedule import Schedule

# Collective -> algorithm -> schedule for N devices (and a root, where there is one).
# The first algorithm of each is the standard one.
SCHEDULES: dict[str, dict[str, Callable[..., Schedule]]] = {
    "all_reduce": {
        "ring": ring,
        "bidirectional_ring": bidirectional_ring,
        "star": star,
        "pipelined_star": pipelined_star,
        "tree": tree,
        "pipelined_tree": pipelined_tree,
        "double_binary_tree": double_binary_tree,
        "recursive_doubling": recursive_doubling,
        "halving_doubling": halving_doubling,
        "direct": direct,
    },
    "reduce_scatter": {
        "ring": ring_reduce_scatter,
        "bidirectional_ring": bidirectional_ring_reduce_scatter,
        "direct": direct_reduce_scatter,
    },
    "all_gather": {
        "ring": ring_all_gather,
        "bidirectional_ring": bidirectional_ring_all_gather,
        "direct": direct_all_gather,
    },
    "reduce": {
        "star": star_reduce,
        "tree": tree_reduce,
        "pipelined_tree": pipelined_tree_reduce,
    },
    "broadcast": {
        "star": star_broadcast,
        "tree": tree_broadcast,
        "pipelined_tree": pipelined_tree_broadcast,
    },
    "gather": {"star": star_gather},
    "scatter": {"star": star_scatter},
}


@functools.lru_cache(maxsize=1024)
def build(
    collective: str,
    algorithm: str,
    devices: int,
    root: int = 0,
    sizes: tuple[int, ...] | None = None,
) -> Schedule:
    """Looks up an algorithm and builds its schedule.

    Args:
        collective: A key of `SCHEDULES`, such as `"all_reduce"`.
        algorithm: Such as `"ring"` or `"star"`, where `SCHEDULES` has it for the
            collective; or `"hierarchical"`, for an all-reduce over two axes.
        devices: N >= 1.
        root: Rank of the root, for the collectives that have one.
        sizes: Devices on each axis, where there are several; ranks are row-major. Only
            `"hierarchical"` minds: the first axis counts the hosts.

    Raises:
        ValueError: Unknown algorithm, no devices, a root that is no device, or sizes of
            other devices.
    """
    over_axes = {"hierarchical"} if collective == "all_reduce" else set()
    choices = SCHEDULES[collective]
    if algorithm not in {*choices, *over_axes}:
        others = ["auto", "native"] if collective == "all_reduce" else []
        raise ValueError(
            f"{collective} got algorithm={algorithm!r}. It must be one of "
            f"{sorted([*choices, *over_axes, *others])}, or a "
            "jaxdp.schedule.Schedule of your own."
        )
    if devices < 1:
        raise ValueError(
            f"{collective} got {devices} devices. It needs at least 1. Give the number "
            "of devices on the mesh axis."
        )
    if not 0 <= root < devices:
        raise ValueError(
            f"{collective} got root={root} on {devices} devices. The root is a rank "
            f"from 0 to {devices - 1}: choose one of those."
        )
    if sizes is not None and math.prod(sizes) != devices:
        raise ValueError(
            f"{collective} got sizes={sizes} for {devices} devices. Axes of these "
            f"sizes have {math.prod(sizes)} devices. Give one size per axis, whose "
            f"product is {devices}."
        )
    if algorithm in over_axes:
        return hierarchical(devices, _hosts(collective, devices, sizes))
    if collective in ("all_reduce", "reduce_scatter", "all_gather"):
        return choices[algorithm](devices)
    return choices[algorithm](devices, root)


def _hosts(collective: str, devices: int, sizes: tuple[int, ...] | None) -> int:
    """The first of two axes."""
    if sizes is None or len(sizes) != 2:
        axes = "one axis" if sizes is None else f"axes of sizes {sizes}"
        raise ValueError(
            f"{collective} got algorithm='hierarchical' on {axes}, of {devices} "
            "devices in all. It needs two axes: hosts, and devices in a host. Give "
            "axis_name=('hosts', 'devices') on a mesh that has both, or pass the "
            f"schedule jaxdp.algorithms.hierarchical({devices}, hosts=...)."
        )
    return sizes[0]
