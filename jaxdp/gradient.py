"""How the traced program of a device's gradient is run: what a design may change."""

from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

PyTree = Any


class GradientProgram:
    """Runs the program as it is; designs that keep parts of arrays override it.

    Attributes:
        reduces: Whether gradients leave it averaged over the devices, in parts.
    """

    reduces: bool = False

    def traced(self, params: PyTree) -> PyTree:
        """What the loss is traced with: arrays, or their shapes.

        Args:
            params: What the design gives of the parameters on this device.
        """
        return params

    def run(self, program: ClosedJaxpr, arguments: list, loss: int) -> list:
        """Results of the program.

        Args:
            program: From parameters and inputs to gradients, loss and all else.
            arguments: One for each of the program's; of parameters what the design
                gives.
            loss: The number of the result that is the total to differentiate.
        """
        del loss
        return jaxpr_as_fun(program)(*arguments)

    def reduced(self, gradients: PyTree, ready: list[int]) -> PyTree:
        """Gradients as they leave a micro-batch.

        Args:
            gradients: This device's, of the rows of one micro-batch.
            ready: When each is ready, as numbers that sort.
        """
        del ready
        return gradients
