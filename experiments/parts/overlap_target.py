"""Compiles for H100 GPUs on a machine that has none.

XLA needs the description of a GPU, `h100.textproto`, and its CUDA compiler, which comes
in two packages of jaxlib's version. No CUDA library and no driver is used.
"""

import importlib.metadata
import importlib.util
import os
import pathlib

import jax
from jax.experimental import topologies

import jaxdp

DESCRIPTION = pathlib.Path(__file__).with_name("h100.textproto")
COMPILER = "jax_plugins.xla_cuda12"
# XLA warns of every permute that its models have no time for; JAX sets 1, warnings. It
# is read when the compiler is loaded, which is when JAX starts.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"


def missing() -> str:
    """What keeps this machine from compiling for an H100, and the remedy; or ""."""
    if _installed(COMPILER):
        return ""
    version = importlib.metadata.version("jaxlib")
    return (
        "XLA's compiler for NVIDIA GPUs is not installed, so nothing was compiled for "
        "an H100. Install it, 0.5 GB without CUDA: pip install --no-deps "
        f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
    )


def mesh(devices: int) -> jax.sharding.Mesh:
    """A mesh of H100 GPUs of one host, to compile for and not to run on."""
    topology = topologies.get_topology_desc(
        "h100",
        "cuda",
        topology=f"1x1x{devices}",  # partitions x hosts x devices
        target_config=DESCRIPTION.read_text(encoding="utf-8"),
    )
    return jaxdp.data_mesh(topology.devices)


def _installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False
