"""One exchange of `Zero`, as every device runs it.

Gradients that are whole are reduced to parts, bucket by bucket, or averaged compressed
and cut. This device's parts of the parameters are updated, and gathered where the train
state keeps whole arrays.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.buckets import assign, scoped
from jaxdp.designs import zero_state
from jaxdp.designs.base import AxisName, PyTree
from jaxdp.designs.update import Update, Updated
from jaxdp.designs.zero_state import Working
from jaxdp.loss import Contribution, Mean
from jaxdp.zero.gathering import IN_FLIGHT, after
from jaxdp.zero.partition import on_shards
from jaxdp.zero.shards import is_shard, own
from jaxdp.zero.wire import Wire

if TYPE_CHECKING:
    from jaxdp.designs.zero import Zero


class ZeroExchange:
    """The moves of a design over its axes, inside `shard_map`."""

    def __init__(self, design: "Zero", update: Update, axis_name: AxisName):
        """Looks up the axes: the last one is sharded over."""
        self.design, self.update, self.axis_name = design, update, axis_name
        self.wire = Wire.over(axis_name, design.algorithm)

    def step(
        self, contribution: Contribution, params: PyTree, opt_state: Any
    ) -> Updated:
        """Reduces, updates and gathers."""
        mean = self.design.rest_averaged(contribution, self.axis_name)
        masters = self._masters(params)
        kept, left = opt_state, None
        if self.design.compression is not None:
            kept = opt_state.opt_state
            gradients, left = self._compressed(contribution, mean, masters, opt_state)
        else:
            gradients = contribution.gradients
            if self.design.stage == 1:
                gradients = self._reduced(gradients, contribution.ready)
            gradients = self.update.gradients(Mean(gradients, mean.loss.weight))
        new, state, results = self.update.with_gradients(
            *(gradients, mean, masters, zero_state.together(kept)),
            agree=self._first,
            optimized=self._optimized,
        )
        state = zero_state.divided(state)
        if left is not None:
            state = opt_state.after(left, state, results)
        return Updated(self._gathered(new, params), state, results)

    def _masters(self, params: PyTree) -> PyTree:
        """This device's parts of the parameters."""
        if isinstance(params, Working) or self.design.stage == 3:
            return zero_state.masters_of(params)
        wire = self.wire
        return jax.tree.map(lambda x: own(x, wire.rank, wire.devices), params)

    def _reduced(self, gradients: PyTree, ready: Any) -> PyTree:
        """Whole local gradients to this device's parts of their mean, by buckets."""
        found, structure = jax.tree.flatten(gradients)
        leaves = self.design.released(found)
        shards: list[Any] = [None] * len(leaves)
        for scope, bucket in scoped(self.design.assign(leaves, ready), leaves):
            with scope:
                made = self.wire.reduce_scatter([leaves[i] for i in bucket])
            for i, shard in zip(bucket, made, strict=True):
                shards[i] = shard
        return structure.unflatten(shards)

    def _compressed(self, contribution, mean, masters, kept):
        """Compressed gradients, averaged everywhere and cut; residuals and states."""
        wire, update = self.wire, self.update
        local = update.gradients(Mean(contribution.gradients, mean.loss.weight))
        shape = jax.tree.structure(masters, is_leaf=is_shard)
        about = contribution.ready, update.step, wire.axis_name
        averaged, left = self.design.travelled(local, kept, shape, *about)
        gradients = [
            None if leaf is None else own(leaf, wire.rank, wire.devices)
            for leaf in averaged
        ]
        return shape.unflatten(gradients), left

    def _gathered(self, masters: PyTree, like: PyTree) -> PyTree:
        """What the train state keeps of updated parts: all, in stages 1 and 2."""
        if self.design.stage == 3:
            return masters
        copies = like.copies if isinstance(like, Working) else like
        leaves, structure = jax.tree.flatten(copies)
        # Else XLA computes the update once more where rows are put together, from the
        # old parameters, which it then has to copy.
        shards = lax.optimization_barrier(
            [
                shard.like(shard.data.astype(leaf.dtype))
                for shard, leaf in zip(
                    structure.flatten_up_to(masters), leaves, strict=True
                )
            ]
        )
        done: list[jax.Array] = []
        with jax.named_scope("parameters"):
            for bucket in assign(leaves, self.design.bucket_cap_mb):
                waits = done[:-IN_FLIGHT][-1:]
                given = after([shards[i] for i in bucket], waits)
                gathered = lax.optimization_barrier(self.wire.gather(given))
                for i, leaf in zip(bucket, gathered, strict=True):
                    leaves[i] = leaf
                done += [leaves[i] for i in bucket if leaves[i].size][:1]
        copies = structure.unflatten(leaves)
        return Working(copies, masters) if isinstance(like, Working) else copies

    def _optimized(self, *given: PyTree) -> Any:
        """The optimizer, run on parts."""
        return on_shards(self.update.optimized, given, given[1:], self.wire.axis_name)

    def _first(self, nonfinite: jax.Array) -> jax.Array:
        """The first parameter whose gradient is not finite anywhere; -1 if none."""
        none = jnp.iinfo(jnp.int32).max
        number = jnp.where(nonfinite < 0, none, nonfinite)
        number = lax.pmin(number, self.wire.axis_name)
        return jnp.where(number == none, -1, number)
