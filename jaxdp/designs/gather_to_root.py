"""Gather-to-root: the exchange of `nn.DataParallel`, as one SPMD program.

Every device sends its gradients to the root, which alone averages them and runs the
optimizer; then the new parameters go out to all. Before and after a step every device
holds the parameters, and the root alone holds an optimizer state that is true: other
devices carry a stale copy, since an SPMD program allocates the same buffers everywhere.

Article A, stages 7 and 8: gradients are summed on the main device, the optimizer runs
there once, parameters are sent out again.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdp.collectives import broadcast, reduce
from jaxdp.designs.base import Design
from jaxdp.designs.portable import Portable
from jaxdp.designs.stacks import spread
from jaxdp.designs.update import Updated
from jaxdp.trees import stacked


@dataclasses.dataclass(frozen=True)
class GatherToRoot(Design):
    """Gradients go to one device, parameters come back from it.

    Cost: 2 rounds; the root receives (N - 1) K bytes and sends as many, the others K.

    Attributes:
        root: Rank of the root on the mesh axis.
    """

    root: int = 0

    def check(self, devices):
        """Checks that the root is a rank."""
        if not 0 <= self.root < devices:
            raise ValueError(
                f"GatherToRoot got root={self.root} on a mesh of {devices} devices. "
                f"The root is a rank from 0 to {devices - 1}: choose one of those."
            )

    def opt_state_spec(self, axis_name):
        """One optimizer state per device, stacked along a leading axis."""
        return P(axis_name)

    def init_opt_state(self, optimizer, params, sizes):
        """Stacks one copy per device; entry `root` is the one that counts."""
        return stacked(optimizer.init(params), sizes)

    def portable(self, params, opt_state):
        """The optimizer state of the root."""
        own = jax.tree.map(lambda leaf: leaf[self.root], opt_state)
        return Portable(params, own, {})

    def kept(self, portable, params, opt_state):
        """A copy for every device."""
        return portable.params, jax.tree.map(spread, portable.opt_state, opt_state)

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Reduces to the root, updates there and broadcasts."""
        mean = reduce(contribution, axis_name, root=self.root, mean=True)
        own_state = jax.tree.map(lambda leaf: leaf[0], opt_state)

        def keep(mean, params, own_state):
            shapes = jax.eval_shape(update, mean, params, own_state)
            results = jax.tree.map(jnp.zeros_like, shapes.results)
            return Updated(params, own_state, results)

        is_root = lax.axis_index(axis_name) == self.root
        params, own_state, results = lax.cond(
            is_root, update, keep, mean, params, own_state
        )
        params, results = broadcast((params, results), axis_name, root=self.root)
        opt_state = jax.tree.map(lambda leaf: leaf[None], own_state)
        return Updated(params, opt_state, results)
