"""All-reduce designs: every device averages the gradients and updates for itself.

Each device holds the parameters and the optimizer state, before and after a step. Since
all hold the same bits of the averaged gradient, all make the same update. This is the
exchange of PyTorch's DistributedDataParallel (Li et al., VLDB 2020, section 3), and its
buckets: flat, of one dtype, filled in the order in which the backward pass finishes
gradients, the first one small. A bucket travels as soon as its gradients exist: no data
dependence ties it to the rest of the backward pass.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdp.buckets import assign, is_summable
from jaxdp.collectives import Algorithm, all_reduce
from jaxdp.compression import BucketWire, Compression, exchange
from jaxdp.designs.base import Design, PyTree, Updated, stacked, where
from jaxdp.executor import accumulation_dtype
from jaxdp.loss import Mean
from jaxdp.primitive import scheduled

GPUS = ("cuda", "gpu", "rocm")  # names of the platform


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


class Bucketed(Design):
    """Base of designs that average in buckets; they have these options."""

    bucket_cap_mb: float | None
    first_bucket_mb: float | None
    overlap: bool

    def check(self, devices):
        """Checks the options."""
        del devices
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            cap = getattr(self, name)
            if cap is not None and not cap > 0:
                raise ValueError(
                    f"{type(self).__name__} got {name}={cap}. It must be larger than 0 "
                    "MiB. Use 25.0 and 1.0, the defaults, or None: bucket_cap_mb=None "
                    "packs everything into one bucket, and first_bucket_mb=None lets "
                    "the first one be as large as the others."
                )

    def assign(self, leaves, ready):
        """Buckets in the order in which their last leaf is ready."""
        return assign(leaves, self.bucket_cap_mb, self.first_bucket_mb, ready)

    def averaged(self, leaves: list, ready: Any, axis_name: str) -> list:
        """Averages leaves over the replicas, bucket by bucket."""
        leaves = self.released(leaves)
        for bucket in self.assign(leaves, ready):
            mean = self._mean([leaves[i] for i in bucket], axis_name)
            for i, leaf in zip(bucket, mean, strict=True):
                leaves[i] = leaf
        return leaves

    def released(self, leaves: list) -> list:
        """The leaves, as early as they may travel: all together without overlap."""
        return list(leaves) if self.overlap else _together(leaves)

    def _mean(self, leaves: list, axis_name: str) -> list:
        """Averages one bucket."""
        raise NotImplementedError

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Averages bucket by bucket, then updates on every device."""
        leaves, structure = jax.tree.flatten(contribution)
        leaves = self.averaged(leaves, contribution.ready, axis_name)
        return update(jax.tree.unflatten(structure, leaves), params, opt_state)


class Compressible(Bucketed):
    """Base of designs whose buckets travel by rounds of our own."""

    compression: Compression | None
    algorithm: Algorithm

    def buckets(self, contribution):
        """Compressed gradients travel by themselves."""
        if self.compression is None:
            return super().buckets(contribution)
        count = len(jax.tree.leaves(contribution.gradients))
        leaves, ready = jax.tree.leaves(contribution), contribution.ready
        rest = self.assign(leaves[count:], ready[count:])
        gradients = self.assign(leaves[:count], ready[:count])
        return [[count + i for i in bucket] for bucket in rest] + gradients

    def compiler_options(self, platform):
        """Keeps XLA from combining permutes of different buckets."""
        return rings_apart(platform)

    def check_training(self, optimizer, params, sizes):
        """Checks that the parameters can be compressed."""
        del optimizer, sizes
        if self.compression is not None:
            self.compression.check(params)

    def init_opt_state(self, optimizer, params, sizes):
        """Optimizer state, and residuals of zero."""
        opt_state = optimizer.init(params)
        if self.compression is None:
            return opt_state
        residuals = None
        if self.compression.error_feedback:
            residuals = stacked(jax.tree.map(jnp.zeros_like, params), sizes)
        states = [self.compression.init(leaf) for leaf in jax.tree.leaves(params)]
        return Compressed(opt_state, residuals, states)

    def opt_state_spec(self, axis_name):
        """Residuals differ between devices."""
        if self.compression is None:
            return P()
        residuals = P(axis_name) if self.compression.error_feedback else None
        return Compressed(P(), residuals, P())

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Averages bucket by bucket, then updates on every device."""
        if self.compression is None:
            return super().exchange(contribution, params, opt_state, update, axis_name)
        return self._compressed(contribution, params, opt_state, update, axis_name)

    def _mean(self, leaves, axis_name):
        return all_reduce(leaves, axis_name, self.algorithm, mean=True)

    def _compressed(self, contribution, params, kept, update, axis_name) -> Updated:
        """Gradients travel compressed; loss, metrics and model state as they are.

        What is compressed is in the unit of the final gradient, so that a residual
        means the same in steps of another weight or loss scale.
        """
        count = len(jax.tree.leaves(contribution.gradients))
        leaves, structure = jax.tree.flatten(contribution)
        ready = contribution.ready
        leaves[count:] = self.averaged(leaves[count:], ready[count:], axis_name)
        mean = jax.tree.unflatten(structure, leaves)
        local = update.gradients(Mean(mean.gradients, mean.loss.weight))
        shape = jax.tree.structure(params)
        residuals = None
        if kept.residuals is not None:
            residuals = [x[0] for x in shape.flatten_up_to(kept.residuals)]
        parcels = _Parcels(shape.flatten_up_to(local), residuals, [*kept.states])
        self._exchange(parcels, ready[:count], update.step, axis_name)
        gradients = shape.unflatten(parcels.gradients)
        params, opt_state, results = update.with_gradients(
            gradients, mean, params, kept.opt_state
        )
        if parcels.residuals is not None:
            residuals = shape.unflatten([x[None] for x in parcels.residuals])
        new = residuals, parcels.states
        if results.nonfinite is not None:  # a skipped step has sent nothing
            new = where(results.nonfinite < 0, new, (kept.residuals, kept.states))
        return Updated(params, Compressed(opt_state, *new), results)

    def _exchange(self, parcels: "_Parcels", ready, step, axis_name) -> None:
        """Averages the gradients in place, bucket by bucket."""
        assert self.compression is not None
        gradients, residuals, states = parcels
        travelling = [i for i, g in enumerate(gradients) if g is not None]
        leaves = self.released([gradients[i] for i in travelling])
        root_key = jax.random.key(0)  # only for rounding
        for bucket in self.assign(leaves, ready):
            numbers = [travelling[i] for i in bucket]
            wire = BucketWire(axis_name, step, root_key, numbers, self.algorithm)
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


class _Parcels(NamedTuple):
    """Gradients, residuals and states by parameter; None for what does not travel."""

    gradients: list
    residuals: list | None
    states: list


@dataclasses.dataclass(frozen=True)
class RingAllReduce(Compressible):
    """Gradients travel around a ring, in buckets.

    Cost: per bucket 2 (N - 1) rounds; 2 (N - 1) K / N bytes sent per device in all;
        with `compression`, what that says.

    Attributes:
        bucket_cap_mb: Leaves are packed into flat buckets of at most so many MiB; loss
            and metrics ride in them. None makes one bucket per dtype.
        first_bucket_mb: The cap of the first bucket, which travels first; None for no
            other than that of all.
        overlap: False holds all buckets back until the backward pass is done.
        compression: How gradients travel, such as `jaxdp.compression.Bf16()`; None for
            as they are.
    """

    bucket_cap_mb: float | None = 25.0
    first_bucket_mb: float | None = 1.0
    overlap: bool = True
    compression: Compression | None = None

    algorithm: ClassVar[Algorithm] = "ring"


@dataclasses.dataclass(frozen=True)
class AllReduce(Compressible):
    """Gradients travel by any algorithm, in buckets.

    Cost: per bucket, that of the algorithm.

    Attributes:
        algorithm: "ring", "star", or a `jaxdp.schedule.Schedule` of an all-reduce.
        bucket_cap_mb: As for `RingAllReduce`, like all that follow.
        first_bucket_mb: The cap of the first bucket.
        overlap: Whether buckets travel during the backward pass.
        compression: How gradients travel.
    """

    algorithm: Algorithm = "ring"
    bucket_cap_mb: float | None = 25.0
    first_bucket_mb: float | None = 1.0
    overlap: bool = True
    compression: Compression | None = None

    def check(self, devices):
        """Checks the options."""
        super().check(devices)
        scheduled("all_reduce", self.algorithm, "data", devices)


@dataclasses.dataclass(frozen=True)
class NativeAllReduce(Bucketed):
    """XLA's own all-reduce, written out as `lax.psum`: the baseline of the others.

    Cost: XLA's choice; with a ring, 2 (N - 1) K / N bytes sent per device. 16-bit
        leaves are summed, and travel, as float32.

    Attributes:
        bucket_cap_mb: None: one all-reduce per leaf, which XLA merges as it likes. With
            a cap, flat buckets of at most so many MiB, and XLA is told not to merge.
        first_bucket_mb: The cap of the first bucket.
        overlap: False holds all back until the backward pass is done.
    """

    bucket_cap_mb: float | None = None
    first_bucket_mb: float | None = 1.0
    overlap: bool = True

    def assign(self, leaves, ready):
        """Each leaf alone, without a cap."""
        if self.bucket_cap_mb is not None:
            return super().assign(leaves, ready)
        together = assign(leaves, None, ready=ready)
        return [[i] for bucket in together for i in bucket]

    def compiler_options(self, platform):
        """Keeps XLA from merging the buckets."""
        if self.bucket_cap_mb is None:
            return {}
        if platform == "cpu":
            return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
        if platform in GPUS:
            return {"xla_gpu_all_reduce_combine_threshold_bytes": 0}
        return {}

    def _mean(self, leaves, axis_name):
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        devices, dtype = lax.axis_size(axis_name), leaves[0].dtype
        flat = [leaf.astype(accumulation_dtype(dtype)).reshape(-1) for leaf in leaves]
        total = lax.psum(jnp.concatenate(flat), axis_name)
        mean = (total / devices).astype(dtype)
        parts = jnp.split(mean, np.cumsum([leaf.size for leaf in leaves])[:-1])
        return [p.reshape(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)]


def rings_apart(platform: str) -> dict[str, Any]:
    """Options that keep XLA from combining permutes of different buckets.

    On GPUs it combines small ones between the same devices, and then one bucket waits
    for the gradients of another.
    """
    if platform not in GPUS:
        return {}
    return {"xla_gpu_collective_permute_combine_threshold_bytes": 0}


def _together(leaves: list) -> list:
    """The leaves, each of which waits for all of them.

    XLA drops its barriers before it schedules, so this is a dependence on data that is
    never true: a number above infinity.
    """
    leaves = [jnp.asarray(leaf) if is_summable(leaf) else leaf for leaf in leaves]
    firsts = [leaf.reshape(-1)[0] for leaf in leaves if is_summable(leaf) and leaf.size]
    if not firsts:
        return leaves
    above = [jnp.real(x).astype(jnp.float32) > jnp.inf for x in firsts]
    impossible = jnp.stack(above).any()
    return [jnp.where(impossible, 0, x) if is_summable(x) else x for x in leaves]
