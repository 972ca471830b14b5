"""The gradient's program where parameters or gradients are in parts."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxdp.buckets import assign
from jaxdp.gradient import GradientProgram
from jaxdp.precision import Precision
from jaxdp.zero.gathering import order_of_use, run_gathered
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

    def traced(self, params):
        """Shapes of whole arrays; stacked layers stay in parts."""

        def shape(leaf):
            if not is_shard(leaf):
                return leaf
            dtype = self._cast(leaf).dtype
            return jax.ShapeDtypeStruct(leaf.shape, dtype)

        return jax.tree.map(shape, params, is_leaf=is_shard)

    def run(self, program, arguments, loss):
        """Gathers bucket by bucket, in order of use."""
        numbers = [i for i, x in enumerate(arguments) if is_shard(x)]
        if not numbers:
            return super().run(program, arguments, loss)
        order = order_of_use(program, numbers)
        shapes = [program.in_avals[i] for i in order]
        buckets = [
            [order[i] for i in bucket]
            for bucket in assign(shapes, self.design.bucket_cap_mb)
        ]
        return run_gathered(
            program, arguments, buckets, loss, self._gather, self.design.prefetch
        )

    def reduced(self, gradients, ready):
        """This device's parts of the mean; as they are if the design does it later."""
        if not self.reduces:
            return gradients
        return self.design.reduced(gradients, ready, self.wire)

    def _gather(self, shards: Sequence[Shard]) -> list[jax.Array]:
        """Whole arrays, in the dtype that computes."""
        return self.wire.gather(self._cast([*shards]))

    def _cast(self, tree: PyTree) -> PyTree:
        """In the dtype that computes."""
        return tree if self.precision is None else self.precision.to_compute(tree)
