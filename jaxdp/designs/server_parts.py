"""The optimizer state of a `ParameterServer`, in parts and in one.

Entry r of a leaf `[N, ...]` is that of the part which rank r updates. A leaf of the
whole state that is like a parameter, by its path (`jaxdp.trees.own_parameter`) and by
its shape, is cut as that parameter is (`jaxdp.serving`); all others are the same on
every server.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.designs.server_round import Served
from jaxdp.designs.stacks import spread
from jaxdp.serving import owned_parts, part_shape
from jaxdp.trees import Path, module_of, own_parameter

PyTree = Any


class Parts(NamedTuple):
    """Which rank has which part.

    Attributes:
        servers: S.
        inner: Devices of each.
        devices: N, of all ranks.
    """

    servers: int
    inner: int
    devices: int

    @classmethod
    def of(cls, served: Served, servers: int, serving_ranks: int) -> "Parts":
        """As a state says by its shapes."""
        leaves = jax.tree.leaves(served.opt_state)
        outer = served.refused.shape[0] + serving_ranks
        devices = leaves[0].shape[0] if leaves else outer
        return cls(servers, devices // outer, devices)

    @property
    def count(self) -> int:
        """How many parts there are."""
        return self.servers * self.inner

    def joined(self, opt_state: PyTree, params: PyTree) -> PyTree:
        """The whole state, of leaves `[N, ...]`."""
        part = np.arange(self.count)
        ranks = part % self.servers * self.inner + part // self.servers

        shapes = _shapes(params)

        def join(path, leaf):
            shape = shapes.get(own_parameter(path, shapes))
            if shape is None or leaf.shape[1:] != part_shape(shape, self.count):
                return leaf[0]
            return leaf[ranks].reshape(-1)[: math.prod(shape)].reshape(shape)

        return jax.tree_util.tree_map_with_path(join, opt_state)

    def cut(self, whole: PyTree, params: PyTree, like: PyTree) -> PyTree:
        """Leaves `[N, ...]` as `like`, of the whole state."""
        owned = owned_parts(self.devices, self.inner, self.servers)
        shapes = _shapes(params)

        def cut(path, leaf, wanted):
            if leaf.shape != shapes.get(own_parameter(path, shapes)):
                return spread(leaf, wanted)
            shape = part_shape(leaf.shape, self.count)
            missing = self.count * math.prod(shape) - math.prod(leaf.shape)
            flat = module_of(leaf).pad(leaf.reshape(-1), (0, missing))
            return flat.reshape(self.count, *shape)[owned]

        return jax.tree_util.tree_map_with_path(cut, whole, like)


def _shapes(params: PyTree) -> dict[Path | None, tuple[int, ...]]:
    """The shape of every parameter, by its path."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {path: param.shape for path, param in found}
