"""Compiles a function for devices that are not here."""

from typing import Any

import jax

from jaxdp.targets import topology
from jaxdp.targets.quiet import quietly
from jaxdp.trainer import Trainer


def compile_for(
    fn: Any,
    *args: Any,
    target: str = "h100",
    devices: int = 8,
    hosts: int = 1,
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles a program for accelerators that need not exist here."""
    mesh = topology.mesh(target, devices, hosts)
    owner = getattr(fn, "__self__", None)
    if not isinstance(owner, Trainer):
        raise NotImplementedError
    lowered = owner.on(mesh).lower_abstract(*args)
    with quietly():
        return lowered.compile(compiler_options=compiler_options)
