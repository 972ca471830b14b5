"""Model states, such as BatchNorm statistics: what becomes of them on each replica.

`None`: replicas must not differ. "mean": float leaves are averaged. "broadcast": the
first replica's goes to all, as with DistributedDataParallel's `broadcast_buffers`,
which does it before the next forward pass. "per_replica": each keeps its own, as
without.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import marks
from jaxdp.buckets import is_key, is_summable

PyTree = Any
POLICIES = (None, "mean", "per_replica", "broadcast")


def after(policy: str | None, new: PyTree, old: PyTree, weight: Any) -> PyTree:
    """The model state after some rows; what it was if all of them are padding.

    Args:
        policy: One of `POLICIES`.
        new: As loss_fn returned it.
        old: As loss_fn received it.
        weight: Of the loss of these rows, or None.
    """

    def keep(new, old):
        new = new if is_key(new) else jnp.asarray(new, old.dtype)
        counts = policy == "mean" and not is_summable(new)  # must be alike
        if weight is None or policy is None or counts:
            return new
        return jnp.where(weight > 0, new, old)

    return jax.tree.map(keep, new, old)


def marked(policy: str | None, model_state: PyTree) -> PyTree:
    """States, for the guard, which leaves must be the same on all replicas."""
    if policy in ("broadcast", "per_replica"):
        return model_state
    averages = policy == "mean"

    def mark(path, leaf):
        if averages and is_summable(leaf):
            return leaf
        name = f"model_state{jax.tree_util.keystr(path)}"
        return marks.alike(leaf, name, averages)

    return jax.tree_util.tree_map_with_path(mark, model_state)


def pairs(
    policy: str | None, pair: Callable[[Any], Any], tree: PyTree, like: PyTree
) -> PyTree:
    """What a design averages of a model state: pairs for floats; None if nothing.

    Args:
        policy: One of `POLICIES`.
        pair: Makes a pair of a leaf of `tree`.
        tree: The model state, or anything of its structure.
        like: The model state.
    """
    if policy != "mean":
        return None
    return jax.tree.map(lambda x, leaf: pair(x) if is_summable(leaf) else x, tree, like)
