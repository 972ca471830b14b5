"""Averaging in buckets, as DistributedDataParallel does.

Buckets are flat, of one dtype, and filled in the order in which the backward pass
finishes gradients; the first one is small. A bucket travels as soon as its gradients
exist: no data dependence ties it to the rest of the backward pass (Li et al., VLDB
2020, section 3.2). Of the buckets that are ready one travels at a time, in order, as on
the one stream of a communicator: see `jaxdp.turns`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.buckets import assign, is_summable, scoped
from jaxdp.collectives import Algorithm, all_reduce_in_turn
from jaxdp.designs.base import Design
from jaxdp.loss import Contribution
from jaxdp.turns import Turns
from jaxdp.waiting import never

IN_FLIGHT = 1  # buckets that travel at a time, unless one asks for another number
GPUS = ("cuda", "gpu", "rocm")  # names of the platform


class Bucketed(Design):
    """Base of designs that average in buckets; they have these options.

    A bucket travels by `algorithm`; so many at a time as `in_flight` says.
    """

    bucket_cap_mb: float | None
    first_bucket_mb: float | None
    overlap: bool
    algorithm: Algorithm = "ring"
    in_flight: int | None = IN_FLIGHT
    unroll: bool | None = None

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
        if self.in_flight is not None and not self.in_flight >= 1:
            raise ValueError(
                f"{type(self).__name__} got in_flight={self.in_flight}. At least 1 "
                f"bucket must be able to travel at a time. Use {IN_FLIGHT}, the "
                "default, or None to let all that are ready travel."
            )

    def compiler_options(self, platform):
        """Keeps XLA from combining permutes of different buckets, and from guessing.

        On GPUs it combines small ones between the same devices, and then one bucket
        waits for the gradients of another. Its scheduler takes all transfers for
        equally long, unless it is told to estimate them.
        """
        if platform not in GPUS:
            return {}
        options = {"xla_gpu_collective_permute_combine_threshold_bytes": 0}
        if self.in_flight is not None:
            options["xla_gpu_enable_analytical_latency_estimator"] = True
        return options

    def assign(self, leaves, ready):
        """Buckets in the order in which their last leaf is ready."""
        return assign(leaves, self.bucket_cap_mb, self.first_bucket_mb, ready)

    def averaged(self, leaves: list, ready: Any, axis_name: str) -> list:
        """Averages leaves over the replicas, bucket by bucket."""
        leaves, turns = self.released(leaves), Turns(self.in_flight)
        for scope, bucket in scoped(self.assign(leaves, ready), leaves):
            with scope:
                mean = self._mean([leaves[i] for i in bucket], axis_name, turns)
            for i, leaf in zip(bucket, mean, strict=True):
                leaves[i] = leaf
        return leaves

    def rest_averaged(self, contribution: Contribution, axis_name: str) -> Contribution:
        """The contribution with all averaged but its gradients."""
        count = len(jax.tree.leaves(contribution.gradients))
        leaves, structure = jax.tree.flatten(contribution)
        ready = contribution.ready[count:]
        with jax.named_scope("rest"):
            leaves[count:] = self.averaged(leaves[count:], ready, axis_name)
        return structure.unflatten(leaves)

    def released(self, leaves: list) -> list:
        """The leaves, as early as they may travel: all together without overlap."""
        return list(leaves) if self.overlap else _together(leaves)

    def _mean(self, leaves: list, axis_name: str, turns: Turns) -> list:
        """Averages one bucket."""
        how = self.algorithm, True, self.unroll
        return all_reduce_in_turn(turns, leaves, axis_name, *how)

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Averages bucket by bucket, then updates on every device."""
        leaves, structure = jax.tree.flatten(contribution)
        leaves = self.averaged(leaves, contribution.ready, axis_name)
        return update(jax.tree.unflatten(structure, leaves), params, opt_state)


def _together(leaves: list) -> list:
    """The leaves, each of which waits for all of them."""
    leaves = [jnp.asarray(leaf) if is_summable(leaf) else leaf for leaf in leaves]
    waits = [leaf for leaf in leaves if is_summable(leaf) and leaf.size]
    if not waits:
        return leaves
    early = never(waits)
    return [jnp.where(early, 0, x) if is_summable(x) else x for x in leaves]
