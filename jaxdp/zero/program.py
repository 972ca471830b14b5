"""The gradient's program where parameters or gradients are in parts."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxdp import marks
from jaxdp.buckets import assign, scoped
from jaxdp.gradient import GradientProgram, Leaving
from jaxdp.precision import Precision
from jaxdp.zero.gathering import Scatter, order_of_use, run_gathered
from jaxdp.zero.layers import LayerShards, check_scanned
from jaxdp.zero.shards import Shard, is_shard
from jaxdp.zero.wire import Wire

if TYPE_CHECKING:
    from jaxdp.designs.zero import Zero

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ShardedProgram(GradientProgram):
    """Gathers parameters where they are used, and reduces gradients where they appear.

    Attributes:
        design: Says which, and by which buckets.
        wire: Over which axes.
        precision: What the loss computes in: parameters are cast before they travel.
        reduces: Whether gradients are reduced here.
    """

    design: "Zero"
    wire: Wire
    precision: Precision | None
    reduces: bool = False

    def unreduced(self):
        """Of one device alone, to tell what there is to be reduced."""
        return dataclasses.replace(self, reduces=False)

    def traced(self, params):
        """Shapes of whole arrays; stacked layers stay in parts."""

        def shape(leaf):
            if not is_shard(leaf):
                return leaf
            dtype = self._cast(leaf).dtype
            return jax.ShapeDtypeStruct(leaf.shape, dtype)

        return jax.tree.map(shape, params, is_leaf=is_shard)

    def run(self, program, arguments, loss, leaving):
        """Gathers in order of use, and reduces gradients in the order they appear in.

        Those of stacked layers leave the program as parts already.
        """
        if self.design.stage < 3 and not self.reduces:
            return super().run(program, arguments, loss, leaving)
        layered = self._layered(arguments, leaving)
        names = [f"params{leaving.names[i]}" for i in layered]
        check_scanned(program, [i - 1 for i in layered], names)
        unneeded = leaving.names.keys() - {*leaving.numbers}
        results = run_gathered(
            *(program, arguments, self._gathers(program, arguments)),
            *(loss, self._gather, self.design.prefetch),
            *self._scatters(program, leaving, layered),
            unneeded=unneeded,
        )
        for i in {*layered} - unneeded if self.reduces else ():
            results[i] = leaving.finished(i, results[i])
        return [0.0 if result is None else result for result in results]

    def reduced(self, gradients):
        """Sums of stacked layers to their mean, as a tree of shards."""
        return jax.tree.map(
            lambda x: self._mean_of(x) if isinstance(x, LayerShards) else x,
            gradients,
            is_leaf=lambda x: is_shard(x) or isinstance(x, LayerShards),
        )

    def _gathers(self, program: ClosedJaxpr, arguments: list) -> list[list[int]]:
        """Arguments that are gathered together, in order of use."""
        numbers = [i for i, x in enumerate(arguments) if is_shard(x)]
        if not numbers:
            return []
        order = order_of_use(program, numbers)
        shapes = [program.in_avals[i] for i in order]
        together = assign(shapes, self.design.bucket_cap_mb)
        return [[order[i] for i in bucket] for bucket in together]

    def _layered(self, arguments: list, leaving: Leaving) -> list[int]:
        """Gradients of stacked layers: parameters that are neither whole nor shards."""
        if self.design.stage < 3:
            return []
        return [i for i in leaving.names if not is_shard(arguments[i - 1])]

    def _scatters(
        self, program: ClosedJaxpr, leaving: Leaving, layered: Collection[int]
    ) -> tuple[list[tuple[int, ...]], Scatter]:
        """Results that are reduced together, and how."""
        pairs = zip(leaving.numbers, leaving.ready, strict=True)
        whole = [(i, at) for i, at in pairs if i not in layered and self.reduces]
        shapes = [program.out_avals[i] for i, _ in whole]
        together = self.design.assign(shapes, [at for _, at in whole])
        buckets = [tuple(whole[i][0] for i in bucket) for bucket in together]
        named = zip(scoped(together, shapes), buckets, strict=True)
        scopes = {bucket: scope for (scope, _), bucket in named}

        def scatter(numbers, leaves):
            with jax.named_scope("exchange"), scopes[tuple(numbers)]:
                finished = list(map(leaving.finished, numbers, leaves))
                return self.wire.reduce_scatter(finished)

        return buckets, scatter

    def _mean_of(self, layers: LayerShards) -> PyTree:
        """Parts of sums over the sharded axis, as those of the mean over all."""
        wire = self.wire
        shards, structure = jax.tree.flatten(layers.shards, is_leaf=is_shard)

        def mean(total):
            part = marks.aggregated(total, wire.axis_name) / wire.devices
            if wire.outer is not None:
                (part,) = wire.everywhere([part], (wire.outer,))
            return part

        return structure.unflatten(
            [None if x.data is None else x.like(mean(x.data)) for x in shards]
        )

    def _gather(self, shards: Sequence[Shard]) -> list[jax.Array]:
        """Whole arrays, in the dtype that computes."""
        with jax.named_scope("gathered"):
            return self.wire.gather(self._cast([*shards]))

    def _cast(self, tree: PyTree) -> PyTree:
        """In the dtype that computes."""
        return tree if self.precision is None else self.precision.to_compute(tree)
