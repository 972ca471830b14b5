"""XLA's compilers for CUDA and TPU: whether they are installed, and their start."""

import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from jaxdp.targets.chips import Chip, chip

INSTALL = "pip install 'jax-data-parallel[compile]'"
# With one plugin of CUDA 12 or 13 on the path, JAX loads it under this platform.
_CUDA = {"jax_plugins.xla_cuda12": "cuda12", "jax_plugins.xla_cuda13": "cuda13"}
# Has JAX take the plugin though CUDA's libraries, which compiling does not need, are
# missing or old.
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# Else libtpu asks a cloud's metadata server what it runs on, and lets one process at a
# time in, as if it used the chips.
_LIBTPU = ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")


def missing(target: str) -> str:
    """What keeps this machine from compiling for a target, with the remedy; or "".

    Args:
        target: One of `jaxdp.targets.NAMES`.

    Raises:
        ValueError: An unknown target; lists those that there are.
    """
    about = chip(target)
    if not _module(about):
        wanted = "jax_plugins.xla_cuda12" if about.backend == "cuda" else "libtpu"
        return (
            f"XLA's compiler for {about.name} is not installed: there is no module "
            f"{wanted!r}. It needs no accelerator, only Linux on x86-64, and comes "
            f"with an extra: {INSTALL}"
        )
    return _mismatch(_CUDA[_module(about)]) if about.backend == "cuda" else ""


def topology_of(about: Chip, name: str, **options: Any) -> list[Any]:
    """The devices of a topology that need not be here, host by host.

    Args:
        about: The chip; its compiler is installed.
        name: Of the topology; for a TPU its shape.
        options: As the plugin wants them.
    """
    platform = about.backend
    if platform == "tpu":
        for variable in _LIBTPU:
            os.environ.setdefault(variable, "1")
    try:
        found = topologies.get_topology_desc(name, platform, **options)
    except NotImplementedError:
        if platform != "cuda":
            raise
        _register_cuda(_module(about))
        found = topologies.get_topology_desc(name, platform, **options)
    return sorted(found.devices, key=lambda device: (device.process_index, device.id))


def _register_cuda(module: str) -> None:
    """Registers the plugin that JAX has left out, as it does where CUDA is missing."""
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        importlib.import_module(module).initialize()
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before


def _module(about: Chip) -> str:
    """The module with a chip's compiler; "" if there is none."""
    wanted = _CUDA if about.backend == "cuda" else ("libtpu",)
    return next((module for module in wanted if _installed(module)), "")


def _mismatch(plugin: str) -> str:
    """What is wrong with the versions of a plugin's packages; or ""."""
    ours = importlib.metadata.version("jaxlib")
    for package in (f"jax-{plugin}-plugin", f"jax-{plugin}-pjrt"):
        try:
            theirs = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if theirs != ours:
            return (
                f"The compiler has another version than JAX: {package} is {theirs} and "
                f"jaxlib is {ours}. Install them alike: pip install "
                f"'jax[{plugin}-local]=={jax.__version__}'"
            )
    return ""


def _installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False
