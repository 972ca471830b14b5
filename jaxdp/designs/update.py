"""What becomes of averaged contributions: the optimizer's update, or none."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.loss import Contribution, Mean, divided
from jaxdp.loss_scale import first_nonfinite
from jaxdp.trees import where
from jaxdp.zero.shards import is_shard

PyTree = Any


class Results(NamedTuple):
    """What a step tells besides parameters; the same on all devices.

    Attributes:
        metrics: Averaged loss and metrics.
        model_state: The averaged model state; None if it is not averaged.
        nonfinite: `[]`, int32: the first parameter, by number, whose averaged gradient
            has an infinity or NaN, so that nothing was updated; -1 if none. None
            without a loss scale.
    """

    metrics: dict[str, Any]
    model_state: PyTree
    nonfinite: Any = None


class Updated(NamedTuple):
    """What an exchange makes."""

    params: PyTree
    opt_state: PyTree
    results: Results


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What becomes of averaged contributions, wherever a design lets it run.

    It must run on averages only. Parameters may be parts of the tree, if the optimizer
    is separable; see `jaxdp.separable`.

    Attributes:
        optimizer: The optimizer.
        model_state: Before the step: stays where nobody has a weight.
        step: `[]`, int32, updates before this one.
        scaled: Whether the loss was, so that only finite gradients are applied.
    """

    optimizer: optax.GradientTransformation
    model_state: PyTree = None
    step: Any = 0
    scaled: bool = False

    def __call__(
        self, mean: Contribution, params: PyTree, opt_state: PyTree
    ) -> Updated:
        """Applies the optimizer to an averaged contribution, if that is finite."""
        gradients = self.gradients(Mean(mean.gradients, mean.loss.weight))
        return self.with_gradients(gradients, mean, params, opt_state)

    def with_gradients(
        self,
        gradients: PyTree,
        mean: Contribution,
        params: PyTree,
        opt_state: PyTree,
        agree: Callable[[jax.Array], jax.Array] = lambda nonfinite: nonfinite,
        optimized: Callable[..., tuple[PyTree, PyTree]] | None = None,
    ) -> Updated:
        """As a call, with gradients that are divided already.

        Args:
            gradients: What the optimizer is given; None for zeros.
            mean: The averaged contribution; its gradients are not used.
            params: The parameters.
            opt_state: The optimizer state.
            agree: Makes one `Results.nonfinite` of those of all devices, where
                gradients differ between them.
            optimized: Runs `self.optimized` in another way, where these trees are in
                parts.
        """
        gradients = _filled(gradients, params)
        run = optimized or self.optimized
        updated, state = run(gradients, params, opt_state)
        results = self.results(mean)
        if self.scaled:
            nonfinite = agree(first_nonfinite(jax.tree.leaves(gradients)))
            updated, state = where(nonfinite < 0, (updated, state), (params, opt_state))
            results = results._replace(nonfinite=nonfinite)
        return Updated(updated, state, results)

    def apply(
        self, mean: Mean, params: PyTree, opt_state: PyTree, staleness: Any = 0
    ) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state after one update, finite or not.

        Args:
            mean: Total of the gradients, a tree, and its weight.
            params: The parameters.
            opt_state: The optimizer state.
            staleness: How many updates old the weights of the gradients are, for
                optimizers that ask (`jaxdp.scale_by_staleness`).
        """
        gradients = _filled(self.gradients(mean), params)
        return self.optimized(gradients, params, opt_state, staleness)

    def gradients(self, mean: Mean) -> PyTree:
        """Divides by the weight."""
        return jax.tree.map(lambda g: divided(Mean(g, mean.weight)), mean.total)

    def optimized(
        self, gradients: PyTree, params: PyTree, opt_state: PyTree, staleness: Any = 0
    ) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state after the optimizer has run."""
        update = optax.with_extra_args_support(self.optimizer).update
        staleness = jnp.asarray(staleness, jnp.int32)
        with jax.named_scope("update"):
            updates, new = update(gradients, opt_state, params, staleness=staleness)
            # A learning rate that is an array may have widened what it met.
            new = jax.tree.map(_like, new, opt_state)
            return optax.apply_updates(params, updates), new

    def results(self, mean: Contribution) -> Results:
        """Metrics and model state of an averaged contribution."""
        metrics = {"loss": mean.loss, **mean.metrics}
        metrics = {name: divided(metric) for name, metric in metrics.items()}
        if mean.model_state is None:
            return Results(metrics, None)

        def average(old, new):
            if not isinstance(new, Mean):
                return new
            average = divided(new)
            if new.weight is not None:
                average = jnp.where(new.weight > 0, average, old)
            return average.astype(old.dtype)  # weights may have widened it

        return Results(
            metrics, jax.tree.map(average, self.model_state, mean.model_state)
        )


def _filled(gradients: PyTree, params: PyTree) -> PyTree:
    """Gradients, with zeros for those that did not travel."""

    def fill(param, gradient):
        zeros = jax.tree.map(jnp.zeros_like, param)  # of a shard, too
        return zeros if gradient is None else gradient

    return jax.tree.map(fill, params, gradients, is_leaf=is_shard)


def _like(leaf: Any, old: Any) -> Any:
    """A leaf in the dtype of another."""
    return leaf if leaf.dtype == old.dtype else leaf.astype(old.dtype)
