"""When a compiled program computes and communicates: a prediction."""

from typing import NamedTuple

from jaxdp.program.hlo import Module
from jaxdp.targets.hardware import Hardware


class Timeline(NamedTuple):
    """A predicted run."""

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


def replay(module: Module, hardware: Hardware | str) -> Timeline:
    """Runs a schedule on two streams."""
    raise NotImplementedError(module.entry, hardware)
