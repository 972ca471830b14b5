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
import functools
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdp import guard
from jaxdp.buckets import assign
from jaxdp.compression import Compression
from jaxdp.designs.base import PyTree
from jaxdp.designs.bucketed import scoped
from jaxdp.designs.compressed import Compressible, Parcels
from jaxdp.designs.portable import Portable
from jaxdp.designs.update import Update, Updated
from jaxdp.loss import Contribution, Mean
from jaxdp.trees import stacked, where
from jaxdp.zero.layers import LayerShards
from jaxdp.zero.partition import on_shards, sharded_leaves, unpartitionable
from jaxdp.zero.program import ShardedProgram
from jaxdp.zero.shards import Shard, cut, is_real, is_shard, own, whole
from jaxdp.zero.wire import Wire


class Working(NamedTuple):
    """Parameters of stages 1 and 2 that compute in another dtype than they are kept in.

    Attributes:
        copies: What the loss sees, on every device.
        masters: The parameters, in parts.
    """

    copies: PyTree
    masters: PyTree


class ZeroState(NamedTuple):
    """What a train state keeps for `Zero` besides parameters.

    Attributes:
        shards: The optimizer state, with None for leaves that are whole.
        whole: The optimizer state, with None for leaves that are in parts: counters,
            factored statistics, the same on all devices.
        residuals: What compression has not sent yet, `[N, ...]`; None without.
        states: What compression keeps for each parameter; None without.
    """

    shards: PyTree
    whole: PyTree
    residuals: PyTree = None
    states: PyTree = None


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

    @property
    def overlap(self) -> bool:
        """Stage 1 keeps all gradients until the backward pass is done."""
        return self.stage > 1

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced as they appear, and leave the loss in parts."""
        return self.stage > 1 and self.compression is None

    def check(self, devices):
        """Checks the options."""
        super().check(devices)
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            raise ValueError(
                f"Zero got stage={self.stage!r}. It must be 1 (optimizer state in "
                "parts), 2 (gradients too) or 3 (parameters too). For stage 0, which "
                "is plain data parallelism, use jaxdp.RingAllReduce()."
            )
        if not isinstance(self.prefetch, int | np.integer) or self.prefetch < 0:
            raise ValueError(
                f"Zero got prefetch={self.prefetch!r}. It is a number of buckets, at "
                "least 0. Leave it out for 1: the next bucket travels while one is used."
            )
        if self.algorithm not in ("ring", "native"):
            raise ValueError(
                f"Zero got algorithm={self.algorithm!r}. It must be 'ring' or 'native'."
            )
        if self.layers and self.stage != 3:
            raise ValueError(
                f"Zero got layers={self.layers!r} with stage={self.stage}. Layers are "
                "gathered one by one where parameters are in parts: leave them out, or "
                "use stage=3."
            )

    def check_training(self, optimizer, params, sizes):
        """Checks that parameters and optimizer can be cut into parts."""
        if self.compression is not None:
            if sizes[1:]:
                raise ValueError(
                    f"Zero got {self.compression} and a mesh of {sizes} devices. "
                    "Compressed gradients travel over one axis. Use a mesh with one "
                    "axis, or no compression."
                )
            self.compression.check(params)
            if self.layers:
                raise ValueError(
                    f"Zero got {self.compression} and layers={self.layers!r}. Gradients "
                    "of layers are reduced inside the scan, where nothing is "
                    "compressed. Leave out one of the two."
                )
        self._check_layers(params)
        update = Update(optimizer).optimized
        opt_state = jax.eval_shape(optimizer.init, params)
        if why := unpartitionable(update, params, params, opt_state):
            raise ValueError(
                f"Zero runs the optimizer on parts of {sizes[-1]} devices, and {why}. "
                "Every operation of an optimizer must be one that a device can run "
                "alone, on its parts or on gathered arrays. Take that out of the "
                "optimizer, or use jaxdp.RingAllReduce(), where every device runs all "
                "of it."
            )

    def buckets(self, contribution):
        """Gradients travel apart from all else."""
        count = len(jax.tree.leaves(contribution.gradients))
        leaves, ready = jax.tree.leaves(contribution), contribution.ready
        rest = assign(leaves[count:], None, None, ready[count:])
        gradients = self.assign(leaves[:count], ready[:count])
        return [[count + i for i in bucket] for bucket in rest] + gradients

    def init_params(self, params, sizes, precision):
        """Whole in stages 1 and 2, perhaps with masters in parts; parts in stage 3."""
        if self.stage == 3 or _has_copies(precision):
            masters = self._cut(params, sizes[-1])
            if self.stage == 3:
                return masters
            return Working(precision.to_compute(params), masters)
        return params

    def params_spec(self, axis_name, precision):
        """Parts lie on the last axis."""
        inner = P(_inner(axis_name))
        if self.stage == 3:
            return inner
        return Working(P(), inner) if _has_copies(precision) else P()

    def local_params(self, kept, axis_name):
        """Copies if there are any; parts in stage 3."""
        if isinstance(kept, Working):
            return kept.copies
        if not self.layers:
            return kept
        wire = Wire.over(axis_name, self.algorithm)
        return _with_entries(
            kept, {name: LayerShards.of(kept[name], wire) for name in self.layers}
        )

    def local_shapes(self, local):
        """Of whole arrays."""

        def shapes(leaf):
            if isinstance(leaf, LayerShards):
                leaf = leaf.shards
            return jax.tree.map(_whole_shape, leaf, is_leaf=is_shard)

        return jax.tree.map(shapes, local, is_leaf=_in_parts)

    def full_params(self, kept):
        """Masters, put together."""
        masters = kept.masters if isinstance(kept, Working) else kept
        return jax.tree.map(
            lambda x: whole(x) if is_shard(x) else x, masters, is_leaf=is_shard
        )

    def program(self, axis_name, precision):
        """Gathers parameters and reduces gradients inside the gradient's program."""
        wire = Wire.over(axis_name, self.algorithm)
        return ShardedProgram(self, wire, precision, self.reduces)

    def init_opt_state(self, optimizer, params, sizes):
        """The optimizer state, those leaves cut that are like a parameter."""
        opt_state = optimizer.init(params)
        flags = sharded_leaves(opt_state, params)
        paths = self._layered_paths(params)

        def kept(path, leaf, flag):
            layered = any(path[len(path) - len(end) :] == end for end in paths)
            layers = np.shape(leaf)[0] if layered else 1
            return cut(leaf, sizes[-1], layers) if flag else leaf

        opt_state = jax.tree_util.tree_map_with_path(kept, opt_state, flags)
        shards, others = _divided(opt_state)
        if self.compression is None:
            return ZeroState(shards, others)
        residuals = None
        if self.compression.error_feedback:
            residuals = stacked(jax.tree.map(jnp.zeros_like, params), sizes)
        states = [self.compression.init(leaf) for leaf in jax.tree.leaves(params)]
        return ZeroState(shards, others, residuals, states)

    def opt_state_spec(self, axis_name):
        """Parts lie on the last axis."""
        inner = P(_inner(axis_name))
        if self.compression is None:
            return ZeroState(inner, P())
        residuals = inner if self.compression.error_feedback else None
        return ZeroState(inner, P(), residuals, P())

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Reduces what is not reduced yet, updates this device's part, and gathers."""
        wire = Wire.over(axis_name, self.algorithm)
        mean = self.rest_averaged(contribution, axis_name)
        masters = self._masters(params, wire)
        gradients = contribution.gradients
        residuals, states = opt_state.residuals, opt_state.states
        if self.compression is not None:
            local = update.gradients(Mean(gradients, mean.loss.weight))
            gradients, residuals, states = self._compressed(
                local, opt_state, contribution.ready, update.step, wire
            )
        else:
            if not self.reduces:
                gradients = self.reduced(gradients, contribution.ready, wire)
            gradients = update.gradients(Mean(gradients, mean.loss.weight))
        before = _joined(opt_state.shards, opt_state.whole)
        new, state, results = update.with_gradients(
            gradients, mean, masters, before, _first, _on(wire, update)
        )
        new = jax.tree.map(lambda x: _clean(x, wire.rank), new, is_leaf=is_shard)
        if results.nonfinite is not None and states is not None:
            residuals, states = where(  # a skipped step has sent nothing
                results.nonfinite < 0,
                (residuals, states),
                (opt_state.residuals, opt_state.states),
            )
        state = ZeroState(*_divided(state), residuals, states)
        return Updated(self._kept(new, params, wire), state, results)

    def reduced(self, gradients: PyTree, ready: Any, wire: Wire) -> PyTree:
        """Whole local gradients to this device's parts of their mean, by buckets."""
        found, structure = jax.tree.flatten(gradients, is_leaf=_in_parts)
        numbers = [i for i, x in enumerate(found) if not isinstance(x, LayerShards)]
        leaves = self.released([found[i] for i in numbers])
        times = [ready[i] for i in numbers]
        for scope, bucket in scoped(self.assign(leaves, times), leaves):
            with scope:
                shards = wire.reduce_scatter([leaves[i] for i in bucket])
            for i, shard in zip(bucket, shards, strict=True):
                found[numbers[i]] = shard
        found = [
            _mean_of_layers(x, wire) if isinstance(x, LayerShards) else x for x in found
        ]
        return structure.unflatten(found)

    def portable(self, params, opt_state):
        """Whole arrays, without padding."""
        state = jax.tree.map(
            lambda x: whole(x) if is_shard(x) else x,
            _joined(opt_state.shards, opt_state.whole),
            is_leaf=is_shard,
        )
        carried = {}
        if opt_state.states is not None:
            carried["states"] = opt_state.states
        if opt_state.residuals is not None:
            carried["residuals"] = jax.tree.map(
                lambda x: x.mean(axis=0), opt_state.residuals
            )
        return Portable(self.full_params(params), state, carried)

    def _mean(self, leaves, axis_name):
        """Over all axes."""
        return Wire.over(axis_name, self.algorithm).everywhere(leaves)

    def _masters(self, params: PyTree, wire: Wire) -> PyTree:
        """This device's parts of the parameters."""
        if isinstance(params, Working):
            return params.masters
        if self.stage == 3:
            return params
        return jax.tree.map(lambda x: own(x, wire.rank, wire.devices), params)

    def _kept(self, masters: PyTree, like: PyTree, wire: Wire) -> PyTree:
        """What the train state keeps of updated parts: in stages 1 and 2 all of them."""
        if self.stage == 3:
            return masters
        copies = like.copies if isinstance(like, Working) else like
        wanted, structure = jax.tree.flatten(copies)
        shards = structure.flatten_up_to(masters)
        shards = [
            shard.like(shard.data.astype(leaf.dtype))
            for shard, leaf in zip(shards, wanted, strict=True)
        ]
        with jax.named_scope("parameters"):
            for bucket in assign(wanted, self.bucket_cap_mb):
                gathered = wire.gather([shards[i] for i in bucket])
                for i, leaf in zip(bucket, gathered, strict=True):
                    wanted[i] = leaf
        copies = structure.unflatten(wanted)
        return Working(copies, masters) if isinstance(like, Working) else copies

    def _compressed(self, local, kept, ready, step, wire):
        """Averages compressed gradients everywhere, and cuts them."""
        found, structure = jax.tree.flatten(local, is_leaf=lambda leaf: leaf is None)
        residuals = kept.residuals
        if residuals is not None:
            residuals = [x[0] for x in structure.flatten_up_to(residuals)]
        parcels = Parcels(found, residuals, [*kept.states])
        self.exchange_parcels(parcels, ready, step, wire.axis_name)
        gradients = [
            None if leaf is None else own(leaf, wire.rank, wire.devices)
            for leaf in parcels.gradients
        ]
        if residuals is not None:
            residuals = structure.unflatten([x[None] for x in residuals])
        return structure.unflatten(gradients), residuals, parcels.states

    def _cut(self, params: PyTree, devices: int) -> PyTree:
        """Parameters in parts."""

        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: cut(leaf, devices, self._layers(path, leaf)), params
        )

    def _layers(self, path: tuple[Any, ...], leaf: Any) -> int:
        """How many pieces of a parameter are cut by themselves."""
        return np.shape(leaf)[0] if self._is_layered(path) else 1

    def _is_layered(self, path: tuple[Any, ...]) -> bool:
        """Whether a parameter is a stack of layers."""
        return bool(self.layers) and _name(path) in self.layers

    def _layered_paths(self, params: PyTree) -> list[tuple[Any, ...]]:
        """Paths of the parameters that are stacks of layers."""
        found = jax.tree_util.tree_leaves_with_path(params)
        return [path for path, _ in found if self._is_layered(path)]

    def _check_layers(self, params: PyTree) -> None:
        """Refuses names of layers that are not there, or hold no stack."""
        found = jax.tree_util.tree_leaves_with_path(params)
        names = {_name(path) for path, _ in found}
        if missing := [name for name in self.layers if name not in names]:
            raise ValueError(
                f"Zero got layers={self.layers!r}, and the parameters have no "
                f"{missing[0]!r}. Layers are top-level entries: "
                f"{', '.join(sorted(names)) or 'there are none'}."
            )
        for name in self.layers:
            stacks = {np.shape(x)[:1] for path, x in found if _name(path) == name}
            if len(stacks) != 1 or () in stacks:
                raise ValueError(
                    f"Zero got layers={self.layers!r}, and the leaves of {name!r} have "
                    f"leading dimensions {sorted(stacks)}. All must have the same one, "
                    "the number of layers. Stack the layers along axis 0."
                )


def _name(path: tuple[Any, ...]) -> str:
    """The top-level entry that a path leads into."""
    return jax.tree_util.keystr(path[:1], simple=True)


def _inner(axis_name: Any) -> str:
    """The axis that is sharded over."""
    return axis_name if isinstance(axis_name, str) else axis_name[-1]


def _has_copies(precision: Any) -> bool:
    """Whether the loss computes on copies in another dtype."""
    return precision is not None and precision.compute != precision.params


def _in_parts(leaf: Any) -> bool:
    """Whether these are parts of one array, or of stacked layers: for `is_leaf`."""
    return isinstance(leaf, Shard | LayerShards)


def _mean_of_layers(gradients: LayerShards, wire: Wire) -> PyTree:
    """Parts of sums over the sharded axis, to those of the mean over all devices."""
    total, structure = jax.tree.flatten(gradients.shards, is_leaf=is_shard)
    total = [x.like(guard.mark_aggregated(x.data, wire.axis_name)) for x in total]
    mean = [x.data / wire.devices for x in total]
    if wire.outer is not None:
        mean = wire.everywhere(mean, (wire.outer,))
    return structure.unflatten(
        [x.like(data) for x, data in zip(total, mean, strict=True)]
    )


def _with_entries(tree: PyTree, entries: dict[str, Any]) -> PyTree:
    """A dict, or another mapping, with other entries."""
    copied = dict(tree)
    copied.update(entries)
    return copied


def _whole_shape(leaf: Any) -> Any:
    """Shape and dtype of a whole array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _divided(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Shards, and all else; None in place of the other."""

    def only(kind):
        return jax.tree.map(
            lambda x: x if is_shard(x) == kind else None, tree, is_leaf=is_shard
        )

    return only(True), only(False)


def _joined(shards: PyTree, others: PyTree) -> PyTree:
    """Undoes `_divided`."""
    return jax.tree.map(
        lambda shard, other: other if shard is None else shard,
        *(shards, others),
        is_leaf=lambda x: x is None or is_shard(x),
    )


def _first(wire: Wire, nonfinite: jax.Array) -> jax.Array:
    """The first parameter whose gradient is not finite on any device; -1 if none."""
    none = jnp.iinfo(jnp.int32).max
    number = jnp.where(nonfinite < 0, none, nonfinite)
    number = lax.pmin(number, wire.axis_name)
    return jnp.where(number == none, -1, number)


def _on(wire: Wire, update: Update) -> Any:
    """The optimizer, run on parts."""

    def optimized(gradients, params, opt_state):
        sharded = jax.tree.map(is_shard, (params, opt_state), is_leaf=is_shard)
        given = gradients, params, opt_state
        return on_shards(update.optimized, given, sharded, wire.axis_name)

    return optimized


def _clean(shard: Shard, rank: jax.Array) -> Shard:
    """With zeros for padding, where an optimizer may have divided zero by zero."""
    real = is_real(shard, rank)
    if real is None:
        return shard
    return shard.like(jnp.where(real, shard.data, 0))
