"""All-reduce designs: every device averages the gradients and updates for itself.

Each device holds the parameters and the optimizer state, before and after a step. Since
all hold the same bits of the averaged gradient, all make the same update. This is the
exchange of PyTorch's DistributedDataParallel (Li et al., VLDB 2020, section 3).
"""

import dataclasses
import math
from typing import ClassVar

from jaxdp.buckets import assign
from jaxdp.collectives import Algorithm
from jaxdp.compression import Compression
from jaxdp.designs.bucketed import GPUS, IN_FLIGHT, Bucketed
from jaxdp.designs.compressed import Compressible
from jaxdp.schedule import Schedule
from jaxdp.scheduled import scheduled


@dataclasses.dataclass(frozen=True)
class RingAllReduce(Compressible):
    """Gradients travel around a ring, in buckets.

    Cost: per bucket 2 (N - 1) rounds; 2 (N - 1) K / N bytes sent per device in all;
        with `compression`, what that says. Between two processes on CPUs it takes
        twice the time of `NativeAllReduce(25.0)`, which `AllReduce("auto")` uses there.

    Attributes:
        bucket_cap_mb: Leaves are packed into flat buckets of at most so many MiB; loss
            and metrics ride in them. None makes one bucket per dtype.
        first_bucket_mb: The cap of the first bucket, which travels first; None for no
            other than that of all.
        overlap: False holds all buckets back until the backward pass is done.
        compression: How gradients travel, such as `jaxdp.compression.Bf16()`; None for
            as they are.
        unroll: Whether every round is written out in the program, as for
            `jaxdp.all_reduce`; compressed gradients travel as None says.
        in_flight: How many buckets may travel at a time, in order; None for all that
            are ready. One by one, XLA places their rounds beside the backward pass (see
            `jaxdp.turns`). Compressed gradients travel as None says.
    """

    bucket_cap_mb: float | None = 25.0
    first_bucket_mb: float | None = 1.0
    overlap: bool = True
    compression: Compression | None = None
    unroll: bool | None = None
    in_flight: int | None = IN_FLIGHT


@dataclasses.dataclass(frozen=True)
class AllReduce(Compressible):
    """Gradients travel by any algorithm, in buckets.

    On a mesh with two axes all devices average together, ranks through the second axis
    first; `"hierarchical"` needs such a mesh, of hosts and of devices in a host.

    Cost: per bucket, that of the algorithm.

    Attributes:
        algorithm: "ring", "star", "recursive_doubling" (fewest rounds, for gradients so
            small that latency is what costs), a `jaxdp.schedule.Schedule`, or "native"
            or "auto" as for `jaxdp.all_reduce`.
        bucket_cap_mb: As for `RingAllReduce`, like all that follow.
        first_bucket_mb: The cap of the first bucket.
        overlap: Whether buckets travel during the backward pass.
        compression: How gradients travel; on a mesh with one axis.
        unroll: As for `RingAllReduce`.
        in_flight: As for `RingAllReduce`.
    """

    algorithm: Algorithm = "ring"
    bucket_cap_mb: float | None = 25.0
    first_bucket_mb: float | None = 1.0
    overlap: bool = True
    compression: Compression | None = None
    unroll: bool | None = None
    in_flight: int | None = IN_FLIGHT

    most_axes: ClassVar[int] = 2

    def check(self, devices):
        """Checks the options, as far as they do not need all axes."""
        super().check(devices)
        if isinstance(self.algorithm, Schedule):
            return
        if self.algorithm not in ("auto", "native", "hierarchical"):
            scheduled("all_reduce", self.algorithm, "data", devices)

    def check_training(self, optimizer, params, sizes):
        """Checks that the algorithm can run on these axes."""
        super().check_training(optimizer, params, sizes)
        if sizes[1:] and self.compression is not None:
            raise ValueError(
                f"AllReduce got {self.compression} and a mesh of shape {sizes}. "
                "Compressed gradients travel over one axis. Use a mesh with one axis, "
                "or no compression."
            )
        if self.algorithm not in ("auto", "native"):
            devices, axes = math.prod(sizes), sizes if sizes[1:] else None
            scheduled("all_reduce", self.algorithm, "data", devices, sizes=axes)


@dataclasses.dataclass(frozen=True)
class NativeAllReduce(Bucketed):
    """XLA's own all-reduce, written out as `lax.psum`: the baseline of the others.

    Cost: XLA's choice; with a ring, 2 (N - 1) K / N bytes sent per device. 16-bit
        leaves are summed, and travel, as float32. Between processes on CPUs every leaf
        is a call of its own, so there a cap is many times faster.

    Attributes:
        bucket_cap_mb: None: one all-reduce per leaf, which XLA merges as it likes. With
            a cap, flat buckets of at most so many MiB, and XLA is told not to merge.
        first_bucket_mb: The cap of the first bucket.
        overlap: False holds all back until the backward pass is done.
    """

    bucket_cap_mb: float | None = None
    first_bucket_mb: float | None = 1.0
    overlap: bool = True
    algorithm = "native"  # no field: there is no other

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
