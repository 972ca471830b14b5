"""Steps of `DataParallel` and of designs, priced on hardware for any number of devices.

Designs are compiled once and priced by `jaxdp.prediction.price`; `DataParallel` is no
single program, and priced by the schedule of its traffic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxdp import algorithms
from jaxdp.cost import time_s
from jaxdp.prediction import CompiledStep, Model, price
from jaxdp.prediction.links import spread
from jaxdp.targets import Hardware

TARGET = "h100"


class Priced(NamedTuple):
    """A step on some hardware; milliseconds.

    Attributes:
        devices: N.
        compute_ms: What a device computes.
        communication_ms: What its communication takes, hidden or not.
        exposed_ms: What that adds to the step.
    """

    devices: int
    compute_ms: float
    communication_ms: float
    exposed_ms: float

    @property
    def step_ms(self) -> float:
        """Of the whole step."""
        return self.compute_ms + self.exposed_ms


def parameters(model: Model) -> int:
    """How many it has."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model.params))


def designed(
    step: CompiledStep, machine: Hardware, counts: Sequence[int]
) -> list[Priced]:
    """The step of a design.

    Args:
        step: Compiled.
        machine: What it runs on.
        counts: Numbers of devices, rising.
    """
    return [
        _in_ms(row.devices, row.compute_s, row.communication_s, row.exposed_s)
        for row in price([step], counts, machine).rows
    ]


def data_parallel(
    elements: int, compute_s: float, machine: Hardware, counts: Sequence[int]
) -> list[Priced]:
    """`nn.DataParallel`: gradients into one device, parameters out of it.

    All of it is exposed: the sum waits for the backward pass, the next forward pass for
    the parameters.

    Args:
        elements: Parameters, in float32.
        compute_s: What a device computes.
        machine: What it runs on.
        counts: Numbers of devices.
    """
    found = []
    for n in counts:
        star = algorithms.star(n)
        star_s = time_s(star, elements, 4, spread(machine, n, None))
        found.append(_in_ms(n, compute_s, star_s, star_s))
    return found


def _in_ms(
    devices: int, compute_s: float, communication_s: float, exposed_s: float
) -> Priced:
    return Priced(devices, 1e3 * compute_s, 1e3 * communication_s, 1e3 * exposed_s)
