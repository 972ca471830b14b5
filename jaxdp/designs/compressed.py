"""Buckets whose gradients travel compressed, and what a train state keeps for that."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdp.buckets import scoped
from jaxdp.compression import BucketWire, Compression, exchange
from jaxdp.designs.base import PyTree
from jaxdp.designs.bucketed import Bucketed
from jaxdp.designs.stacks import averaged, spread
from jaxdp.designs.update import Results, Updated
from jaxdp.loss import Mean
from jaxdp.trees import stacked, where


class Compressed(NamedTuple):
    """What a train state keeps if gradients are compressed.

    Attributes:
        opt_state: The optimizer state.
        residuals: What each device has not sent yet, like the parameters with a leading
            axis `[N]`; None without error feedback.
        states: What the compression keeps for each parameter, in order.
    """

    opt_state: PyTree
    residuals: PyTree
    states: PyTree

    def after(
        self, left: tuple[PyTree, PyTree], opt_state: PyTree, results: Results
    ) -> "Compressed":
        """After a step that left these residuals and states, unless it is skipped."""
        if results.nonfinite is not None:  # a skipped step has sent nothing
            left = where(results.nonfinite < 0, left, (self.residuals, self.states))
        return Compressed(opt_state, *left)


def unsent(residuals: Any, like: Any) -> Any:
    """Residuals of one parameter, on as many devices as `like` has.

    What matters is their mean over devices, as that of gradients: on another number of
    devices each gets it.
    """
    if residuals.shape == like.shape:
        return residuals
    return spread(averaged(residuals), like)


def carried_of(kept: Compressed) -> dict[str, PyTree]:
    """What a checkpoint keeps of a compression."""
    carried = {"states": kept.states}
    if kept.residuals is not None:
        carried["residuals"] = kept.residuals
    return carried


def with_carried(
    opt_state: PyTree, carried: dict[str, PyTree], fresh: Compressed
) -> Compressed:
    """An optimizer state with carried residuals; fresh ones if there were none."""
    residuals = fresh.residuals
    if residuals is not None and "residuals" in carried:
        residuals = jax.tree.map(unsent, carried["residuals"], residuals)
    return Compressed(opt_state, residuals, carried.get("states", fresh.states))


class Compressible(Bucketed):
    """Base of designs whose buckets travel by rounds of our own."""

    compression: Compression | None

    def buckets(self, contribution):
        """Compressed gradients travel by themselves."""
        if self.compression is None:
            return super().buckets(contribution)
        count = len(jax.tree.leaves(contribution.gradients))
        leaves, ready = jax.tree.leaves(contribution), contribution.ready
        rest = self.assign(leaves[count:], ready[count:])
        gradients = self.assign(leaves[:count], ready[:count])
        return [[count + i for i in bucket] for bucket in rest] + gradients

    def check_training(self, optimizer, params, sizes):
        """Checks that the parameters can be compressed."""
        del optimizer, sizes
        if self.compression is not None:
            self.compression.check(params)

    def init_opt_state(self, optimizer, params, sizes):
        """Optimizer state, and residuals of zero."""
        return self.with_residuals(optimizer.init(params), params, sizes)

    def with_residuals(self, opt_state, params, sizes):
        """Adds what compression keeps, before the first step."""
        if self.compression is None:
            return opt_state
        residuals = None
        if self.compression.error_feedback:
            residuals = stacked(jax.tree.map(jnp.zeros_like, params), sizes)
        states = [self.compression.init(leaf) for leaf in jax.tree.leaves(params)]
        return Compressed(opt_state, residuals, states)

    def opt_state_spec(self, axis_name):
        """Residuals differ between devices."""
        return self.with_residuals_spec(P(), axis_name)

    def with_residuals_spec(self, opt_state, axis_name):
        """How that lies on the mesh, given how the optimizer state does."""
        if self.compression is None:
            return opt_state
        residuals = P(axis_name) if self.compression.error_feedback else None
        return Compressed(opt_state, residuals, P())

    def portable(self, params, opt_state):
        """Residuals and what the compression keeps are carried."""
        if self.compression is None:
            return super().portable(params, opt_state)
        portable = super().portable(params, opt_state.opt_state)
        return portable._replace(carried=carried_of(opt_state))

    def kept(self, portable, params, opt_state):
        """With carried residuals; zeros if there were none."""
        if self.compression is None:
            return super().kept(portable, params, opt_state)
        params, inner = super().kept(portable, params, opt_state.opt_state)
        return params, with_carried(inner, portable.carried, opt_state)

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Averages bucket by bucket, then updates on every device."""
        if self.compression is None:
            return super().exchange(contribution, params, opt_state, update, axis_name)
        return self._compressed(contribution, params, opt_state, update, axis_name)

    def _compressed(self, contribution, params, kept, update, axis_name) -> Updated:
        """Gradients travel compressed; loss, metrics and model state as they are.

        What is compressed is in the unit of the final gradient, so that a residual
        means the same in steps of another weight or loss scale.
        """
        mean = self.rest_averaged(contribution, axis_name)
        local = update.gradients(Mean(mean.gradients, mean.loss.weight))
        shape = jax.tree.structure(params)
        about = contribution.ready, update.step, axis_name
        gradients, left = self.travelled(local, kept, shape, *about)
        params, opt_state, results = update.with_gradients(
            shape.unflatten(gradients), mean, params, kept.opt_state
        )
        return Updated(params, kept.after(left, opt_state, results), results)

    def travelled(
        self,
        local: PyTree,
        kept: Compressed,
        shape: Any,
        ready: Sequence[int],
        step: Any,
        axis_name: str,
    ) -> tuple[list[Any], tuple[PyTree, PyTree]]:
        """The mean of gradients that travel compressed.

        Args:
            local: This device's gradients; None for those that need not travel.
            kept: Before the step.
            shape: The structure of the parameters.
            ready: When each gradient is ready, as numbers that sort.
            step: Updates before this one.
            axis_name: The mesh axis.

        Returns:
            Gradients by parameter, and what is left: residuals and states.
        """
        residuals = None
        if kept.residuals is not None:
            residuals = [x[0] for x in shape.flatten_up_to(kept.residuals)]
        parcels = Parcels(shape.flatten_up_to(local), residuals, [*kept.states])
        self._exchange_parcels(parcels, ready, step, axis_name)
        if parcels.residuals is not None:
            residuals = shape.unflatten([x[None] for x in parcels.residuals])
        return parcels.gradients, (residuals, parcels.states)

    def _exchange_parcels(self, parcels: "Parcels", ready, step, axis_name) -> None:
        """Averages the gradients in place, bucket by bucket."""
        assert self.compression is not None
        gradients, residuals, states = parcels
        travelling = [i for i, g in enumerate(gradients) if g is not None]
        leaves = self.released([gradients[i] for i in travelling])
        root_key = jax.random.key(0)  # only for rounding
        for scope, bucket in scoped(self.assign(leaves, ready), leaves):
            numbers = [travelling[i] for i in bucket]
            wire = BucketWire(axis_name, step, root_key, numbers, self.algorithm)
            with scope:
                means, left, new = exchange(
                    self.compression,
                    [leaves[i] for i in bucket],
                    None if residuals is None else [residuals[i] for i in numbers],
                    [states[i] for i in numbers],
                    wire,
                )
            for j, i in enumerate(numbers):
                gradients[i], states[i] = means[j], new[j]
                if residuals is not None and left is not None:
                    residuals[i] = left[j]


class Parcels(NamedTuple):
    """Gradients, residuals and states by parameter; None for what does not travel."""

    gradients: list
    residuals: list | None
    states: list
