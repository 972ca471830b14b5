"""ZeRO: every device keeps its own part of what data parallelism keeps N times.

The optimizer state is cut into N parts (stage 1), gradients too (stage 2), parameters
too (stage 3). Gradients are reduce-scattered, every device updates its part, and parts
of parameters are gathered: after the update in stages 1 and 2, before each use in stage
3. Per device and parameter, with p, g and k bytes for a parameter, its gradient and its
optimizer state:

    stage    holds                 sends, K bytes of gradients, (N - 1) / N times
    0        p + g + k             2 K, a ring all-reduce
    1        p + g + k / N         2 K
    2        p + (g + k) / N       2 K
    3        (p + g + k) / N       3 K

With a 16-bit `Precision` every device computes on 16-bit copies, and the float32 master
weights are optimizer state: p = g = 2 and k = 12 for Adam.

On a mesh with two axes devices are sharded over the second one alone, and the first one
holds replicas of that: hybrid sharding, inside a host and across hosts.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, sections 5 and 7; hybrid sharding: Zhao et al., "PyTorch
FSDP", VLDB 2023, section 3.2.2.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdp.compression import Compression
from jaxdp.designs import zero_checks, zero_state
from jaxdp.designs.base import PyTree
from jaxdp.designs.bucketed import GPUS
from jaxdp.designs.compressed import (
    Compressible,
    carried_of,
    with_carried,
)
from jaxdp.designs.zero_exchange import ZeroExchange
from jaxdp.designs.zero_state import Working
from jaxdp.precision import Precision
from jaxdp.zero.layers import LayerShards
from jaxdp.zero.program import ShardedProgram
from jaxdp.zero.shards import Shard, cut, is_shard
from jaxdp.zero.wire import Wire


@dataclasses.dataclass(frozen=True)
class Zero(Compressible):
    """Optimizer state, gradients and parameters in parts, one per device.

    The optimizer sees whole arrays: what it computes element by element runs on parts,
    norms are summed over devices, and what needs more (Adafactor's factors, Muon's
    products) is gathered for that operation.

    Cost: stages 1 and 2: per bucket 2 (N - 1) rounds; 2 (N - 1) K / N bytes sent per
        device in all. Stage 3: 3 (N - 1) rounds, 3 (N - 1) K / N bytes. Leaves are
        padded to multiples of N elements. With `accumulate=k`, stage 1 sums whole
        gradients and sends them once; stages 2 and 3 reduce them, and stage 3 gathers
        parameters, k times. Norms in the optimizer travel by `lax.psum`.

    Attributes:
        stage: 1, 2 or 3.
        bucket_cap_mb: Leaves travel in buckets of at most so many MiB; None makes one
            per dtype.
        first_bucket_mb: The cap of the first bucket of gradients.
        prefetch: Stage 3: how many buckets are gathered ahead of the one in use.
        algorithm: "ring", or "native" for XLA's own collectives.
        compression: How gradients travel, as for `RingAllReduce`: compressed ones are
            averaged everywhere, and then cut.
        layers: Stage 3: names of those entries of the parameters whose leaves are
            stacked layers, `[L, ...]`, and which loss_fn hands to `jaxdp.scan_layers`.
    """

    stage: int = 1
    bucket_cap_mb: float | None = 25.0
    first_bucket_mb: float | None = 1.0
    prefetch: int = 1
    algorithm: Literal["ring", "native"] = "ring"
    compression: Compression | None = None
    layers: tuple[str, ...] = ()

    most_axes: ClassVar[int] = 2
    in_flight: ClassVar[None] = None  # it waits for memory: see `jaxdp.zero.gathering`

    @property
    def overlap(self) -> bool:
        """Stage 1 keeps all gradients until the backward pass is done."""
        return self.stage > 1

    @property
    def _reduces(self) -> bool:
        """Whether gradients are reduced where they appear, and not in `exchange`."""
        return self.stage > 1 and self.compression is None

    def check(self, devices):
        """Checks the options."""
        super().check(devices)
        zero_checks.check_options(self)

    def check_training(self, optimizer, params, sizes):
        """Checks that parameters and optimizer can be cut into parts."""
        super().check_training(optimizer, params, sizes)
        zero_checks.check_compression(self, sizes)
        zero_checks.check_layers(self, params)
        zero_checks.check_optimizer(optimizer, params, sizes[-1])

    def buckets(self, contribution):
        """Gradients travel apart from all else; those of stacked layers in a scan."""
        leaves, ready = jax.tree.leaves(contribution), contribution.ready
        found = jax.tree.leaves(contribution.gradients, is_leaf=is_shard)

        def among(numbers):
            buckets = self.assign(
                [leaves[i] for i in numbers], [ready[i] for i in numbers]
            )
            return [[numbers[i] for i in bucket] for bucket in buckets]

        gradients = among([i for i, leaf in enumerate(found) if not is_shard(leaf)])
        rest = among(range(len(found), len(leaves)))
        return gradients + rest if self._reduces else rest + gradients

    def compiler_options(self, platform):
        """Keeps XLA from merging what travels apart."""
        options = super().compiler_options(platform)
        if platform not in GPUS:
            return options
        kinds = "all_gather", "reduce_scatter"
        names = [f"xla_gpu_{kind}_combine_threshold_bytes" for kind in kinds]
        return options | dict.fromkeys(names, 0)

    def init_params(self, params, sizes, precision):
        """Whole in stages 1 and 2, perhaps with masters in parts; parts in stage 3."""
        copies = _copies(precision, params)
        if self.stage < 3 and copies is None:
            return params
        masters = jax.tree_util.tree_map_with_path(
            lambda path, leaf: cut(leaf, sizes[-1], self._layers(path, leaf)), params
        )
        return masters if self.stage == 3 else Working(copies, masters)

    def params_spec(self, axis_name, precision):
        """Parts lie on the last axis."""
        in_parts = P(_last(axis_name))
        if self.stage == 3:
            return in_parts
        return P() if _copies(precision, {}) is None else Working(P(), in_parts)

    def local_params(self, kept, axis_name):
        """Copies if there are any; parts in stage 3."""
        if isinstance(kept, Working):
            return kept.copies
        wire = Wire.over(axis_name, self.algorithm)
        named = {name: LayerShards.of(kept[name], wire) for name in self.layers}
        return {**kept, **named} if named else kept

    def local_shapes(self, local):
        """Of whole arrays."""

        def shape(leaf):
            leaf = leaf.shards if isinstance(leaf, LayerShards) else leaf
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), leaf, is_leaf=is_shard
            )

        return jax.tree.map(shape, local, is_leaf=_in_parts)

    def in_parts(self, name):
        """Parameters are; residuals of a compression are each device's own."""
        return name.startswith("params")

    def full_params(self, kept):
        """Parameters as they are kept, put together."""
        return zero_state.whole_tree(zero_state.masters_of(kept))

    def program(self, axis_name, precision):
        """Gathers parameters and reduces gradients inside the gradient's program."""
        wire = Wire.over(axis_name, self.algorithm)
        return ShardedProgram(self, wire, precision, self._reduces)

    def init_opt_state(self, optimizer, params, sizes):
        """The optimizer state, those leaves in parts that are like a parameter."""
        found = jax.tree_util.tree_leaves_with_path(params)
        stacks = [path for path, _ in found if self._is_layered(path)]
        opt_state = zero_state.initial(optimizer, params, sizes[-1], stacks)
        return self.with_residuals(opt_state, params, sizes)

    def opt_state_spec(self, axis_name):
        """Parts lie on the last axis."""
        kept = zero_state.ZeroState(P(_last(axis_name)), P())
        return self.with_residuals_spec(kept, axis_name)

    def portable(self, params, opt_state):
        """Whole arrays, without padding."""
        if self.compression is None:
            return zero_state.exported(params, opt_state)
        portable = zero_state.exported(params, opt_state.opt_state)
        return portable._replace(carried=carried_of(opt_state))

    def kept(self, portable, params, opt_state):
        """In parts, with new padding."""
        if self.compression is None:
            return zero_state.imported(portable, params, opt_state)
        params, new = zero_state.imported(portable, params, opt_state.opt_state)
        return params, with_carried(new, portable.carried, opt_state)

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Reduces what is not reduced yet, updates this device's parts, and gathers."""
        exchange = ZeroExchange(self, update, axis_name)
        return exchange.step(contribution, params, opt_state)

    def _mean(self, leaves, axis_name, turns):
        """Over all axes."""
        del turns
        return Wire.over(axis_name, self.algorithm).everywhere(leaves)

    def _layers(self, path: tuple[Any, ...], leaf: Any) -> int:
        """How many pieces of a parameter are cut by themselves."""
        return np.shape(leaf)[0] if self._is_layered(path) else 1

    def _is_layered(self, path: tuple[Any, ...]) -> bool:
        """Whether a parameter is a stack of layers."""
        return bool(self.layers) and zero_checks.name(path) in self.layers


def _last(axis_name: Any) -> str:
    """The axis that is sharded over."""
    return axis_name if isinstance(axis_name, str) else axis_name[-1]


def _copies(precision: Precision | None, params: PyTree) -> PyTree | None:
    """Parameters in the dtype that computes; None if it is the one they are kept in."""
    if precision is None or precision.compute == precision.params:
        return None
    return precision.to_compute(params)


def _in_parts(leaf: Any) -> bool:
    """Whether these are parts of one array, or of stacked layers: for `is_leaf`."""
    return isinstance(leaf, Shard | LayerShards)
