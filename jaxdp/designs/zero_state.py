"""What a train state keeps for `Zero`: which arrays are in parts, and which whole."""

from typing import NamedTuple

import jax
import numpy as np
import optax

from jaxdp.designs.base import PyTree
from jaxdp.designs.portable import Portable
from jaxdp.trees import Path, own_parameter
from jaxdp.zero.partition import sharded_leaves
from jaxdp.zero.shards import cut, is_shard, whole


class Working(NamedTuple):
    """Parameters of stages 1 and 2 that compute in another dtype than they are kept in.

    Attributes:
        copies: What the loss sees, on every device.
        masters: The parameters, in parts.
    """

    copies: PyTree
    masters: PyTree


class ZeroState(NamedTuple):
    """The optimizer state, as two trees of its structure: together they are it.

    Attributes:
        shards: What is like a parameter, in parts; None for other leaves.
        whole: Counters and factored statistics, the same on all devices; None for what
            is in parts.
    """

    shards: PyTree
    whole: PyTree


def divided(opt_state: PyTree) -> ZeroState:
    """An optimizer state of which some leaves are shards."""

    def only(in_parts):
        return jax.tree.map(
            lambda x: x if is_shard(x) == in_parts else None,
            opt_state,
            is_leaf=is_shard,
        )

    return ZeroState(only(True), only(False))


def together(kept: ZeroState) -> PyTree:
    """Undoes `divided`."""
    return jax.tree.map(
        lambda shard, other: other if shard is None else shard,
        *kept,
        is_leaf=lambda x: x is None or is_shard(x),
    )


def initial(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    devices: int,
    stacks: list[Path],
) -> ZeroState:
    """The state before the first step, as global arrays.

    Args:
        optimizer: The optimizer.
        params: The parameters.
        devices: N.
        stacks: Paths of parameters that are cut layer by layer.
    """
    opt_state = optimizer.init(params)
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}

    def kept(path, leaf, in_parts):
        if not in_parts:
            return leaf
        layered = own_parameter(path, paths) in stacks
        return cut(leaf, devices, np.shape(leaf)[0] if layered else 1)

    in_parts = sharded_leaves(opt_state, params)
    return divided(jax.tree_util.tree_map_with_path(kept, opt_state, in_parts))


def masters_of(params: PyTree) -> PyTree:
    """The parameters as they are kept: shards, or whole arrays in stages 1 and 2."""
    return params.masters if isinstance(params, Working) else params


def whole_tree(tree: PyTree) -> PyTree:
    """A tree of global shards, put together; whole arrays stay as they are."""
    return jax.tree.map(
        lambda x: whole(x) if is_shard(x) else x, tree, is_leaf=is_shard
    )


def exported(params: PyTree, kept: ZeroState) -> Portable:
    """Whole arrays, without padding."""
    return Portable(whole_tree(masters_of(params)), whole_tree(together(kept)), {})


def imported(
    portable: Portable, params: PyTree, kept: ZeroState
) -> tuple[PyTree, ZeroState]:
    """In parts where a fresh state is."""

    def filled(like, leaf):
        return cut(leaf, like.devices, like.layers) if is_shard(like) else leaf

    def fill(like, tree):
        return jax.tree.map(filled, like, tree, is_leaf=is_shard)

    masters = fill(masters_of(params), portable.params)
    opt_state = divided(fill(together(kept), portable.opt_state))
    if not isinstance(params, Working):
        return masters, opt_state
    copies = jax.tree.map(
        lambda like, x: x.astype(like.dtype), params.copies, portable.params
    )
    return Working(copies, masters), opt_state
