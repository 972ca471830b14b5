"""All-reduce designs: every device averages the gradients and updates for itself.

Each device holds the parameters and the optimizer state, before and after a step. Since
all hold the same bits of the averaged gradient, all make the same update. This is the
exchange of PyTorch's DistributedDataParallel (Li et al., VLDB 2020, section 3).
"""

import dataclasses

import jax
from jax import lax

from jaxdp.buckets import assign, is_summable
from jaxdp.collectives import all_reduce
from jaxdp.designs.base import Design, Updated
from jaxdp.executor import accumulation_dtype


@dataclasses.dataclass(frozen=True)
class RingAllReduce(Design):
    """Gradients travel around a ring, in buckets.

    Cost: per bucket 2 (N - 1) rounds; 2 (N - 1) K / N bytes sent per device in all.

    Attributes:
        bucket_cap_mb: Leaves are packed into flat buckets of at most so many MiB; loss
            and metrics ride in them. None makes one bucket per dtype.
    """

    bucket_cap_mb: float | None = 25.0

    def check(self, devices):
        """Checks the options."""
        del devices
        cap = self.bucket_cap_mb
        if cap is not None and not cap > 0:
            raise ValueError(
                f"RingAllReduce got bucket_cap_mb={cap}. It must be larger than 0 MiB; "
                "25.0 is the default, and None packs everything into one bucket."
            )

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Averages bucket by bucket, then updates on every device."""
        leaves, structure = jax.tree.flatten(contribution)
        for indices in assign(leaves, self.bucket_cap_mb):
            mean = all_reduce([leaves[i] for i in indices], axis_name, mean=True)
            for i, leaf in zip(indices, mean, strict=True):
                leaves[i] = leaf
        return update(jax.tree.unflatten(structure, leaves), params, opt_state)


@dataclasses.dataclass(frozen=True)
class NativeAllReduce(Design):
    """XLA's own all-reduce, written out as `lax.psum`: the baseline of the others.

    Cost: XLA's choice; with a ring, 2 (N - 1) K / N bytes sent per device. 16-bit
        leaves are summed, and travel, as float32.
    """

    def exchange(self, contribution, params, opt_state, update, axis_name) -> Updated:
        """Averages by `lax.psum`, then updates on every device."""
        devices = lax.axis_size(axis_name)

        def mean(leaf):
            if not is_summable(leaf):
                return leaf
            total = lax.psum(leaf.astype(accumulation_dtype(leaf.dtype)), axis_name)
            return (total / devices).astype(leaf.dtype)

        return update(jax.tree.map(mean, contribution), params, opt_state)
