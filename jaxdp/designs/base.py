"""What a design is: one function from local contributions to updated parameters."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxdp.loss import Contribution, Mean, divided

PyTree = Any
AxisName = Any  # of one mesh axis, or a tuple of two names


class Updated(NamedTuple):
    """What an update makes; `results` are averaged loss, metrics and model state."""

    params: PyTree
    opt_state: PyTree
    results: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What becomes of averaged contributions, wherever a design lets it run.

    It must run on averages only. Parameters may be parts of the tree, if the optimizer
    is separable; see `jaxdp.separable`.
    """

    optimizer: optax.GradientTransformation
    model_state: PyTree = None  # before the step: stays where nobody has a weight

    def __call__(
        self, mean: Contribution, params: PyTree, opt_state: PyTree
    ) -> Updated:
        """Applies the optimizer to an averaged contribution."""
        gradients = Mean(mean.gradients, mean.loss.weight)
        params, opt_state = self.apply(gradients, params, opt_state)
        return Updated(params, opt_state, self.results(mean))

    def apply(
        self, mean: Mean, params: PyTree, opt_state: PyTree, staleness: Any = 0
    ) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state after one update.

        Args:
            mean: Total of the gradients, a tree, and its weight.
            params: The parameters.
            opt_state: The optimizer state.
            staleness: How many updates old the weights of the gradients are, for
                optimizers that ask (`jaxdp.scale_by_staleness`).
        """
        gradients = jax.tree.map(lambda g: divided(Mean(g, mean.weight)), mean.total)
        optimizer = optax.with_extra_args_support(self.optimizer)
        updates, opt_state = optimizer.update(
            gradients, opt_state, params, staleness=jnp.asarray(staleness, jnp.int32)
        )
        return optax.apply_updates(params, updates), opt_state

    def results(self, mean: Contribution) -> PyTree:
        """Metrics and model state of an averaged contribution."""
        metrics = {"loss": mean.loss, **mean.metrics}
        metrics = {name: divided(metric) for name, metric in metrics.items()}
        if mean.model_state is None:
            return metrics, None

        def average(old, new):
            if not isinstance(new, Mean):
                return new
            average = divided(new)
            if new.weight is not None:
                average = jnp.where(new.weight > 0, average, old)
            return average.astype(old.dtype)  # weights may have widened it

        return metrics, jax.tree.map(average, self.model_state, mean.model_state)


class Design(abc.ABC):
    """Base of all designs: frozen, hashable dataclasses.

    `N` is the number of devices, `K` the bytes of the gradients.
    """

    most_axes: ClassVar[int] = 1  # of the mesh
    max_staleness: int = 0  # gradients that a state may have in flight

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
