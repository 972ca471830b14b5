"""What a design is: one function from local contributions to updated parameters."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxdp.buckets import assign
from jaxdp.designs.portable import Portable
from jaxdp.designs.update import Update, Updated
from jaxdp.gradient import GradientProgram
from jaxdp.loss import Contribution
from jaxdp.precision import Precision

PyTree = Any
AxisName = Any  # of one mesh axis, or a tuple of two names


class Design(abc.ABC):
    """Base of all designs: frozen, hashable dataclasses.

    `N` is the number of devices, `K` the bytes of the gradients.

    Attributes:
        most_axes: How many axes the mesh may have.
        prunes: Whether contributions may lack gradients.
        skips: Whether it can skip a step for a loss scale.
        max_staleness: How many gradients a state may have in flight.
    """

    most_axes: ClassVar[int] = 1
    prunes: ClassVar[bool] = True
    skips: ClassVar[bool] = True
    max_staleness: int = 0

    @property
    def serving_ranks(self) -> int:
        """How many of the first ranks compute no gradient: they only serve."""
        return 0

    def check(self, devices: int) -> None:
        """Checks the design's options against the ranks on the first mesh axis.

        Raises:
            ValueError: An option does not fit.
        """
        del devices

    def check_training(
        self,
        optimizer: optax.GradientTransformation,
        params: PyTree,
        sizes: tuple[int, ...],
    ) -> None:
        """Checks that the optimizer can run where this design would run it.

        Args:
            optimizer: The optimizer.
            params: The parameters, as arrays.
            sizes: Devices on each mesh axis.

        Raises:
            ValueError: It would train another model there.
        """
        del optimizer, params, sizes

    def buckets(self, contribution: Contribution) -> list[list[int]]:
        """Which leaves of a contribution travel together, by number, in which order.

        Args:
            contribution: Arrays, or their shapes and dtypes.
        """
        leaves = jax.tree.leaves(contribution)
        return self.assign(leaves, contribution.ready)

    def assign(self, leaves: Sequence[Any], ready: Sequence[int]) -> list[list[int]]:
        """Which of some leaves travel together: those of one dtype, unless overridden.

        Args:
            leaves: Arrays, or their shapes and dtypes.
            ready: When each is ready, as numbers that sort.
        """
        return assign(leaves, None, ready=ready)

    def compiler_options(self, platform: str) -> dict[str, Any]:
        """Options without which XLA would undo the design."""
        del platform
        return {}

    def init_params(
        self, params: PyTree, sizes: tuple[int, ...], precision: Precision | None
    ) -> PyTree:
        """What the train state keeps of the parameters, as global arrays.

        Args:
            params: The parameters.
            sizes: Devices on each mesh axis.
            precision: What the loss computes in.
        """
        del sizes, precision
        return params

    def params_spec(self, axis_name: AxisName, precision: Precision | None) -> PyTree:
        """How that lies on the mesh: a prefix tree; replicated, unless overridden."""
        del axis_name, precision
        return P()

    def local_params(self, kept: PyTree, axis_name: AxisName) -> PyTree:
        """What a device's loss is given of the parameters, inside `shard_map`."""
        del axis_name
        return kept

    def local_shapes(self, local: PyTree) -> PyTree:
        """Shapes and dtypes of whole parameters, of what `local_params` gives."""
        return local

    def program(
        self, axis_name: AxisName, precision: Precision | None
    ) -> GradientProgram:
        """How the program of a device's gradient is run: as it is, unless overridden.

        Args:
            axis_name: The mesh axis, or axes.
            precision: What the loss computes in.
        """
        del axis_name, precision
        return GradientProgram()

    def in_parts(self, name: str) -> bool:
        """Whether what differs between devices under this name is made of sums only.

        Args:
            name: Of a leaf of the train state, such as `params['w']`.
        """
        del name
        return False

    def full_params(self, kept: PyTree) -> PyTree:
        """The parameters, of the global arrays that the train state keeps."""
        return kept

    def init_opt_state(
        self,
        optimizer: optax.GradientTransformation,
        params: PyTree,
        sizes: tuple[int, ...],
    ) -> PyTree:
        """What the train state keeps besides parameters, as global arrays.

        Args:
            optimizer: The optimizer.
            params: The parameters.
            sizes: Devices on each mesh axis.
        """
        del sizes
        return optimizer.init(params)

    def opt_state_spec(self, axis_name: AxisName) -> PyTree:
        """How that lies on the mesh: a prefix tree; replicated, unless overridden."""
        del axis_name
        return P()

    def portable(self, params: PyTree, opt_state: PyTree) -> Portable:
        """What a checkpoint keeps of a state; undone by `kept`.

        Args:
            params: What the train state keeps of them, as global arrays. NumPy arrays
                stay such.
            opt_state: What it keeps of the optimizer state, likewise.
        """
        return Portable(params, opt_state, {})

    def kept(
        self, portable: Portable, params: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """What a train state of this design keeps of a checkpoint.

        Args:
            portable: The checkpoint, whichever design made it. NumPy arrays stay such.
            params: A fresh state's, as this design keeps them on its devices: shapes
                and dtypes to fill.
            opt_state: Likewise; its values stand for what the checkpoint does not have.

        Returns:
            Parameters and optimizer state, as global arrays.

        Raises:
            ValueError: The checkpoint carries something that cannot be moved.
        """
        del params, opt_state
        return portable.params, portable.opt_state

    @abc.abstractmethod
    def exchange(
        self,
        contribution: Contribution,
        params: PyTree,
        opt_state: PyTree,
        update: Update,
        axis_name: AxisName,
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
            update: Applies the optimizer; where it runs is the design's choice.
            axis_name: The mesh axis, or the axes if there are several.

        Returns:
            The new parameters, this device's optimizer state, and the results.
        """

    def flush(
        self, params: PyTree, opt_state: PyTree, update: Update, axis_name: AxisName
    ) -> tuple[PyTree, PyTree]:
        """Applies the gradients still in flight: none, unless overridden.

        Devices: as `exchange`.
        """
        del update, axis_name
        return params, opt_state
