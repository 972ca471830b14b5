"""Accelerators that need not be here: compiled for, and priced, from their data sheets.

A chip is a file in `data/chips`; what joins chips is in `data/links.toml`.

Its modules:

    chips, hardware, kinds        data sheets, what is reached, what JAX calls a device
    topology, plugin, quiet       devices of a target, from installed compilers
    compile, retarget, training   a function, or a training, compiled for them
"""

from jaxdp.targets.chips import NAMES, Chip, chip
from jaxdp.targets.compile import compile_for
from jaxdp.targets.hardware import Hardware, Link, hardware, link
from jaxdp.targets.plugin import missing
from jaxdp.targets.topology import mesh

__all__ = (
    "NAMES",
    "Chip",
    "Hardware",
    "Link",
    "chip",
    "compile_for",
    "hardware",
    "link",
    "mesh",
    "missing",
)
