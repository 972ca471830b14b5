"""Meshes of devices that are not here."""

import functools
import math
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxdp.mesh import data_mesh
from jaxdp.targets.chips import Chip, chip
from jaxdp.targets.plugin import missing, topology_of
from jaxdp.targets.quiet import quietly

MOST_TPUS = 256  # chips of one v5e or v6e torus


def mesh(
    target: str, devices: int = 8, hosts: int = 1, axis_name: str = "data"
) -> Mesh:
    """A mesh with one axis of devices that need not exist, to compile for.

    Device i is on host `i // (devices / hosts)`. What hosts change in a program is up
    to the compiler: see `compile_for`.

    Args:
        target: One of `jaxdp.targets.NAMES`.
        devices: How many, over all hosts; a multiple of `hosts`.
        hosts: How many hosts they are in.
        axis_name: Of the mesh axis.

    Returns:
        The mesh; nothing can be put on its devices.

    Raises:
        ValueError: An unknown target, devices that do not divide into hosts, or a torus
            of so many TPUs that does not exist.
        ModuleNotFoundError: The compiler is not installed, or has another version than
            JAX.
    """
    return mesh_for("targets.mesh", target, devices, hosts, axis_name)


def mesh_for(
    caller: str, target: str, devices: int, hosts: int, axis_name: str = "data"
) -> Mesh:
    """As `mesh`, for a public function that errors speak for."""
    about = chip(target)
    _check_sizes(caller, devices, hosts)
    if about.backend == "tpu":
        _check_torus(caller, about, devices)
    if problem := missing(target):
        raise ModuleNotFoundError(f"{caller} got target={target!r}. {problem}")
    with quietly():
        return data_mesh(_devices(target, devices, hosts), axis_name)


def shaped_as(given: Mesh, like: Mesh | AbstractMesh) -> Mesh:
    """A one-axis mesh's devices, with the axes of another mesh of their number."""
    devices = np.asarray(given.devices).reshape(like.axis_sizes)
    return Mesh(devices, like.axis_names, axis_types=like.axis_types)


def _check_sizes(caller: str, devices: int, hosts: int) -> None:
    if devices < 1 or hosts < 1:
        raise ValueError(
            f"{caller} got devices={devices} and hosts={hosts}. Both are numbers of at "
            f"least 1. Use devices={max(devices, 1)} and hosts={max(hosts, 1)}."
        )
    if devices % hosts:
        raise ValueError(
            f"{caller} got devices={devices} and hosts={hosts}. All hosts have "
            f"equally many devices: {devices} is no multiple of {hosts}. Use "
            f"devices={math.ceil(devices / hosts) * hosts}, or another number of hosts."
        )


def _check_torus(caller: str, about: Chip, devices: int) -> None:
    if devices.bit_count() > 1 or devices > MOST_TPUS:
        raise ValueError(
            f"{caller} got devices={devices} for {about.name}. Its tori have 1, 2, "
            f"4, ... {MOST_TPUS} chips, powers of two. Use one of these."
        )


@functools.cache  # asked for again, they would be other devices
def _devices(target: str, devices: int, hosts: int) -> list[Any]:
    """Devices that need not be here, host by host."""
    about = chip(target)
    if about.backend == "cuda":
        return topology_of(
            about,
            target,
            topology=f"1x{hosts}x{devices // hosts}",  # slices x hosts x devices
            target_config=about.target_config(),
        )
    rows, columns = _square(devices)
    bounds = [*_square(devices // hosts), 1]  # the block of the torus that is a host
    torus = f"{about.generation}:{rows}x{columns}"
    return topology_of(about, torus, chips_per_host_bounds=bounds)


def _square(chips: int) -> tuple[int, int]:
    """Rows and columns, as equal as they can be of a power of two."""
    rows = 1 << (chips.bit_length() - 1) // 2
    return rows, chips // rows
