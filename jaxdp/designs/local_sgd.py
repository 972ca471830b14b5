"""Local SGD: replicas train alone, and average their parameters now and then.

Between two averages nothing but loss and metrics travels. Each replica keeps parameters
and an optimizer state of its own; momentum stays local. Post-local SGD averages
gradients at first, while they change fast, and becomes local later.

Sources: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et
al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, section 3 (post-local).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdp import marks
from jaxdp.buckets import same_types
from jaxdp.designs.base import PyTree
from jaxdp.designs.bucketed import Bucketed
from jaxdp.designs.portable import Portable
from jaxdp.designs.stacks import averaged, spread
from jaxdp.designs.update import Update, Updated
from jaxdp.loss import Contribution, Mean
from jaxdp.trees import stacked


@dataclasses.dataclass(frozen=True)
class LocalSGD(Bucketed):
    """Parameters are averaged every few steps, around a ring, in buckets.

    `train.params(state)` is the mean over the replicas. Replicas with no rows make a
    step with a gradient of zero.

    Cost: loss and metrics, in every step. Before `start_step` that of `RingAllReduce`;
        then that of one in every `sync_every`-th step.

    Attributes:
        sync_every: Steps from one average of the parameters to the next; 1 averages
            after every step.
        start_step: Steps with averaged gradients before that.
        bucket_cap_mb: As for `RingAllReduce`, like all that follow.
        first_bucket_mb: The cap of the first bucket.
        overlap: Whether gradients travel during the backward pass.
    """

    sync_every: int
    start_step: int = 0
    bucket_cap_mb: float | None = 25.0
    first_bucket_mb: float | None = 1.0
    overlap: bool = True

    def check(self, devices):
        """Checks the options."""
        super().check(devices)
        for name, least in (("sync_every", 1), ("start_step", 0)):
            given = getattr(self, name)
            if given < least or not float(given).is_integer():
                raise ValueError(
                    f"LocalSGD got {name}={given}. It is a number of steps, at least "
                    f"{least}. For averages in every step use jaxdp.RingAllReduce."
                )

    def init_params(self, params, sizes, precision):
        """A copy for every device."""
        return stacked(params, sizes)

    def params_spec(self, axis_name, precision):
        """Every device has its own."""
        return P(axis_name)

    def local_params(self, kept, axis_name):
        """This device's."""
        return jax.tree.map(lambda leaf: leaf[0], kept)

    def full_params(self, kept):
        """The mean over the replicas."""
        return jax.tree.map(lambda leaf: leaf.mean(axis=0).astype(leaf.dtype), kept)

    def init_opt_state(self, optimizer, params, sizes):
        """A copy for every device."""
        return stacked(optimizer.init(params), sizes)

    def opt_state_spec(self, axis_name):
        """Every device has its own."""
        return P(axis_name)

    def portable(self, params, opt_state):
        """Means over the replicas; what each has of its own is carried."""
        own = (params, opt_state)
        mean, mean_state = jax.tree.map(averaged, own)
        return Portable(mean, mean_state, {"replicas": own})

    def kept(self, portable, params, opt_state):
        """What replicas had; on another number of devices all start from the mean."""
        own = portable.carried.get("replicas")
        if own is not None and same_types(own, (params, opt_state)):
            return own
        mean = (portable.params, portable.opt_state)
        return jax.tree.map(spread, mean, (params, opt_state))

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Updates this replica's parameters, and averages them when it is time."""
        mean = self.rest_averaged(contribution, axis_name)

        def together():
            leaves, shape = jax.tree.flatten(contribution.gradients)
            total = self.averaged(leaves, contribution.ready, axis_name)
            return update.gradients(Mean(shape.unflatten(total), mean.loss.weight))

        def alone():
            return _own_mean(contribution, update)

        gradients = alone()
        if self.start_step:
            gradients = lax.cond(update.step < self.start_step, together, alone)
        own = jax.tree.map(lambda leaf: leaf[0], (params, opt_state))

        def agree(nonfinite):
            return lax.pmax(marks.values(nonfinite), axis_name)

        new = update.with_gradients(gradients, mean, *own, agree=agree)
        params = self._synchronized(new.params, update.step, axis_name)
        params, opt_state = jax.tree.map(lambda x: x[None], (params, new.opt_state))
        return Updated(params, opt_state, new.results)

    def _synchronized(self, params, step, axis_name):
        """The average of the parameters after every `sync_every`-th local step."""
        params = marks.values(params)

        def average(params):
            leaves, shape = jax.tree.flatten(params)
            order = range(len(leaves), 0, -1)  # as gradients, the last first
            with jax.named_scope("parameters"):
                return shape.unflatten(self.averaged(leaves, order, axis_name))

        due = (step >= self.start_step) & ((step + 1) % self.sync_every == 0)
        return lax.cond(due, average, lambda params: params, params)


def _own_mean(contribution: Contribution, update: Update) -> PyTree:
    """The gradient of this replica's own mean loss; zero if it has no weight."""
    weight = contribution.loss.weight
    gradients = update.gradients(Mean(contribution.gradients, weight))
    if weight is None:
        return gradients
    return jax.tree.map(lambda g: jnp.where(weight > 0, g, 0), gradients)
