"""Two streams: of each pair of a process's devices one computes, one communicates.

Inside one XLA CPU program nothing overlaps, but programs on two devices of a process
run side by side. Rank r on both meshes is the same pair, so a value crosses from one to
the other inside its process.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.mesh import data_mesh


class Streams(NamedTuple):
    """Two meshes with one axis each, of equally many devices, made by `two_streams`.

    Attributes:
        compute: The devices that compute.
        communicate: The devices that exchange gradients for those of the same rank.
    """

    compute: Mesh
    communicate: Mesh


def two_streams(
    devices: Sequence[Any] | None = None, axis_name: str = "data"
) -> Streams:
    """Pairs the devices of each process: even ones compute, odd ones communicate.

    Rank r on both meshes is the r-th pair, process by process.

    Args:
        devices: Which, in which order; None takes all of `jax.devices()`.
        axis_name: Name of the axis of both meshes.

    Returns:
        The two meshes, each with half of the devices.

    Raises:
        ValueError: A process with an odd number of devices; none, or one twice.
        TypeError: Something that is no device.

    Example:
        >>> import jaxdp.streams
        >>> streams = jaxdp.streams.two_streams()
        >>> [d.id for d in streams.compute.devices], streams.communicate.size
        ([0, 2, 4, 6], 4)
    """
    owned: dict[int, list[Any]] = {}
    for device in data_mesh(devices).devices.flat:
        owned.setdefault(device.process_index, []).append(device)
    for process, local in owned.items():
        if len(local) % 2:
            raise ValueError(_odd(process, len(local)))
    meshes = [
        data_mesh([d for local in owned.values() for d in local[first::2]], axis_name)
        for first in (0, 1)
    ]
    return Streams(*meshes)


def check_streams(streams: Any) -> None:
    """Refuses what is no pair of meshes that fit.

    Raises:
        TypeError: No `Streams`.
        ValueError: Ranks that are not two devices of one process.
    """
    if not isinstance(streams, Streams):
        raise TypeError(
            f"streams.data_parallel got streams={streams!r}. It needs the two meshes "
            "of jaxdp.streams.two_streams(). Pass what that returns."
        )
    compute, communicate = ([*mesh.devices.flat] for mesh in streams)
    fit = len(compute) == len(communicate) and all(
        a != b and a.process_index == b.process_index
        for a, b in zip(compute, communicate, strict=True)
    )
    if not fit:
        raise ValueError(
            f"streams.data_parallel got streams of {len(compute)} and "
            f"{len(communicate)} devices, {[d.id for d in compute]} and "
            f"{[d.id for d in communicate]}. Rank by rank they must be two devices of "
            "one process. Make them with jaxdp.streams.two_streams()."
        )


def moved(array: jax.Array, source: Mesh, target: Mesh, spec: P) -> jax.Array:
    """An array on the other stream: each device hands its part to that of its rank.

    Returns at once, whether or not the array is there; one copy, inside the process.
    `jax.device_put` of the whole would refuse an array of several processes.

    Args:
        array: On the devices of `source`.
        source: The mesh it is on.
        target: The mesh it goes to.
        spec: How it is split on both.
    """
    rank = {device: r for r, device in enumerate(source.devices.flat)}
    shards = array.addressable_shards
    devices = [target.devices.flat[rank[shard.device]] for shard in shards]
    parts = jax.device_put([shard.data for shard in shards], devices)
    sharding = NamedSharding(target, spec)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _odd(process: int, count: int) -> str:
    """The message for devices that make no pairs."""
    more = count + 1
    return (
        f"two_streams got {count} device(s) of process {process}. One device of a pair "
        f"computes and the other communicates, and {count} = 2 x {count // 2} + 1. "
        f"Give each process {more} devices: JAX_NUM_CPU_DEVICES={more} in its "
        f"environment, or python -m jaxdp.launch --devices-per-process {more}; or "
        "pass an even choice of jax.devices()."
    )
