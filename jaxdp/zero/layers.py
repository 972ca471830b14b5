"""Stacked layers whose parameters are gathered one by one."""

from typing import Any

import jax

from jaxdp.zero.shards import is_shard
from jaxdp.zero.wire import Wire


@jax.tree_util.register_pytree_node_class
class LayerShards:
    """Parts of stacked layers, for `jaxdp.scan_layers`."""

    def __init__(self, shards: Any, wire: Wire):
        """Of a tree of `Shard`s, cut layer by layer."""
        self.shards, self.wire = shards, wire

    @classmethod
    def of(cls, shards: Any, wire: Wire) -> "LayerShards":
        """Of a tree of `Shard`s, cut layer by layer."""
        return cls(shards, wire)

    def tree_flatten(self):
        """Arrays are its children."""
        shards, structure = jax.tree.flatten(self.shards, is_leaf=is_shard)
        return [x.data for x in shards], (structure, tuple(x.like(None) for x in shards), self.wire)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """Undoes it."""
        structure, shards, wire = aux
        filled = [s.like(x) for s, x in zip(shards, children, strict=True)]
        return cls(structure.unflatten(filled), wire)
