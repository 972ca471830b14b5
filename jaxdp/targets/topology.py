"""Meshes of devices that are not here, and what a machine needs to compile for them."""

import importlib.metadata
import importlib.util
import math
import os

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxdp.mesh import data_mesh
from jaxdp.targets.chips import Chip, chip
from jaxdp.targets.quiet import quietly

_INSTALL = "pip install 'jax-data-parallel[compile]'"


def missing(target: str) -> str:
    """What keeps this machine from compiling for a target, with the remedy; or ""."""
    about = chip(target)
    module = "jax_plugins.xla_cuda12" if about.backend == "cuda" else "libtpu"
    if not _installed(module):
        return (
            f"XLA's compiler for {about.name} is not installed: there is no module "
            f"{module!r}. It needs no accelerator, and comes with an extra: {_INSTALL}"
        )
    if about.backend == "cuda":
        return _mismatch()
    return ""


def mesh(
    target: str, devices: int = 8, hosts: int = 1, axis_name: str = "data"
) -> Mesh:
    """A mesh with one axis of devices that need not exist, to compile for.

    Args:
        target: One of `jaxdp.targets.NAMES`.
        devices: How many, over all hosts; a multiple of `hosts`.
        hosts: How many hosts they are in.
        axis_name: Of the mesh axis.

    Raises:
        ValueError: An unknown target, devices that do not divide into hosts, or a torus
            of so many TPUs that does not exist.
        ModuleNotFoundError: The compiler is not installed, or has another version than
            JAX.
    """
    about = chip(target)
    _check_sizes(devices, hosts)
    if problem := missing(target):
        raise ModuleNotFoundError(f"compile_for got target={target!r}. {problem}")
    with quietly():
        if about.backend == "cuda":
            found = topologies.get_topology_desc(
                target,
                "cuda",
                topology=f"1x{hosts}x{devices // hosts}",  # slices x hosts x devices
                target_config=about.target_config(),
            )
        else:
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            found = topologies.get_topology_desc(_torus(about, devices), platform="tpu")
    return data_mesh(sorted(found.devices, key=lambda d: d.id), axis_name)


def _check_sizes(devices: int, hosts: int) -> None:
    if devices < 1 or hosts < 1 or devices % hosts:
        up = math.ceil(max(devices, 1) / max(hosts, 1)) * max(hosts, 1)
        raise ValueError(
            f"compile_for got devices={devices} and hosts={hosts}. All hosts have "
            f"equally many devices, at least 1: {devices} is no multiple of {hosts}. "
            f"Use devices={up}, or another number of hosts."
        )


def _torus(about: Chip, devices: int) -> str:
    """The torus of so many TPUs, as square as a power of two can be."""
    power = devices.bit_length() - 1
    if devices != 1 << power or devices > 256:
        raise ValueError(
            f"compile_for got devices={devices} for {about.name}. Its tori have 1, 2, "
            "4, ... 256 chips, powers of two. Use one of these."
        )
    rows = 1 << (power // 2)
    return f"{about.generation}:{rows}x{devices // rows}"


def _mismatch() -> str:
    ours = importlib.metadata.version("jaxlib")
    for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        try:
            theirs = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if theirs != ours:
            return (
                f"The compiler has another version than JAX: {package} is {theirs} and "
                f"jaxlib is {ours}. Install them alike: pip install "
                f"'jax[cuda12-local]=={jax.__version__}'"
            )
    return ""


def _installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False
