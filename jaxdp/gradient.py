"""How the traced program of a device's gradient is run: what a design may change."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

PyTree = Any


class Leaving(NamedTuple):
    """Gradients that are to be summed over devices.

    Attributes:
        names: Of all gradients, by the number of the result that they are; that number
            is one more than that of the argument.
        numbers: Of those that travel.
        ready: When each of these is ready, as numbers that sort.
        finished: Makes of a number and that result what is summed.
    """

    names: Mapping[int, str]
    numbers: Sequence[int]
    ready: Sequence[int]
    finished: Callable[[int, jax.Array], jax.Array]


class GradientProgram:
    """Runs the program as it is; designs that keep parts of arrays override it.

    Attributes:
        reduces: Whether gradients leave it averaged over the devices, in parts.
    """

    reduces: bool = False

    def unreduced(self) -> "GradientProgram":
        """The same, but gradients leave it whole, as this device's."""
        return self

    def traced(self, params: PyTree) -> PyTree:
        """What the loss is traced with: arrays, or their shapes.

        Args:
            params: What the design gives of the parameters on this device.
        """
        return params

    def run(
        self, program: ClosedJaxpr, arguments: list, loss: int, leaving: Leaving
    ) -> list:
        """Results of the program.

        Args:
            program: From parameters and inputs to gradients, loss and all else.
            arguments: One for each of the program's; of parameters what the design
                gives.
            loss: The number of the result that is the total to differentiate.
            leaving: The gradients. A program that reduces returns parts in their place.
        """
        del loss, leaving
        return jaxpr_as_fun(program)(*arguments)

    def reduced(self, gradients: PyTree) -> PyTree:
        """Gradients as they leave a micro-batch, of the results of `run`."""
        return gradients
