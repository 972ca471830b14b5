"""The optimizer state of a `ParameterServer`, in parts and in one.

Entry r of a leaf `[N, ...]` is that of the part which rank r updates. A leaf of the
whole state that is like a parameter, by the end of its path and by its shape, is cut as
that parameter is (`jaxdp.serving`); all others are the same on every server.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.designs.server_round import Served
from jaxdp.designs.stacks import spread
from jaxdp.serving import owned_parts, part_shape
from jaxdp.trees import module_of

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

        def join(path, leaf):
            shape = _shape_of_parameter(path, params)
            if shape is None or leaf.shape[1:] != part_shape(shape, self.count):
                return leaf[0]
            return leaf[ranks].reshape(-1)[: math.prod(shape)].reshape(shape)

        return jax.tree_util.tree_map_with_path(join, opt_state)

    def cut(self, whole: PyTree, params: PyTree, like: PyTree) -> PyTree:
        """Leaves `[N, ...]` as `like`, of the whole state."""
        owned = owned_parts(self.devices, self.inner, self.servers)

        def cut(path, leaf, wanted):
            if leaf.shape != _shape_of_parameter(path, params):
                return spread(leaf, wanted)
            shape = part_shape(leaf.shape, self.count)
            missing = self.count * math.prod(shape) - math.prod(leaf.shape)
            flat = module_of(leaf).pad(leaf.reshape(-1), (0, missing))
            return flat.reshape(self.count, *shape)[owned]

        return jax.tree_util.tree_map_with_path(cut, whole, like)


def _shape_of_parameter(path: Any, params: PyTree) -> tuple[int, ...] | None:
    """The shape of the parameter whose path ends this one; None if there is none."""
    found = [
        (len(end), param.shape)
        for end, param in jax.tree_util.tree_leaves_with_path(params)
        if len(end) <= len(path) and path[len(path) - len(end) :] == end
    ]
    return max(found)[1] if found else None  # the longest: w may end dense/w
