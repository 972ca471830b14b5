"""What a design is: one function from local contributions to updated parameters."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from jaxdp.loss import Contribution

PyTree = Any


class Updated(NamedTuple):
    """What an update makes; `results` are averaged loss, metrics and model state."""

    params: PyTree
    opt_state: PyTree
    results: PyTree


Update = Callable[[Contribution, PyTree, PyTree], Updated]


class Design(abc.ABC):
    """Base of all designs: frozen, hashable dataclasses.

    `N` is the number of devices, `K` the bytes of the gradients.
    """

    def opt_state_spec(self, axis_name: str) -> P:
        """How the optimizer state lies on the mesh: replicated, unless overridden."""
        del axis_name
        return P()

    def place_opt_state(self, opt_state: PyTree, devices: int) -> PyTree:
        """The optimizer state as the train state keeps it, as global arrays."""
        del devices
        return opt_state

    def check(self, devices: int) -> None:
        """Checks the design's options against the number of devices.

        Raises:
            ValueError: An option does not fit.
        """
        del devices

    @abc.abstractmethod
    def exchange(
        self,
        contribution: Contribution,
        params: PyTree,
        opt_state: PyTree,
        update: Update,
        axis_name: str,
    ) -> Updated:
        """Averages the contributions over the replicas and updates the parameters.

        Devices: runs inside `shard_map` over `axis_name`. Before, the parameters are
        the same on every device and the contributions differ; after, the parameters and
        the results are the same on every device, bit for bit.

        Args:
            contribution: This replica's.
            params: The parameters.
            opt_state: This device's part of the optimizer state, as `opt_state_spec`
                says.
            update: Applies the optimizer to an averaged contribution. It must run on
                averages only; where it runs is the design's choice.
            axis_name: The mesh axis.

        Returns:
            The new parameters, this device's optimizer state, and the results.
        """
