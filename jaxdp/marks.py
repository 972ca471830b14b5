"""Names on values of a step, by which `jaxdp.guard` knows what they are.

A name costs nothing in the compiled program. Whoever makes a value that the guard could
not tell from another one names it: the backward pass its gradients; a design that
collects the gradients of all replicas and makes one of them in another way than by a
sum, what it made.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

PyTree = Any
GRADIENT = "jaxdp gradient of "
AGGREGATED = "jaxdp aggregated over "
VALUE = "jaxdp value of one replica"
CONSTANT = "jaxdp constant"
ALIKE = {  # what is not averaged, and what to do if it differs
    "jaxdp unaveraged ": "Integers, bools and keys are not averaged, so they must not "
    "depend on the batch, the rank or the replica's rng. Make it a float to have it "
    "averaged, return it as it came, or choose model_state='broadcast' or "
    "'per_replica'.",
    "jaxdp unsynchronized ": "data_parallel got no policy for model states that "
    "differ. Choose model_state='mean' (floats are averaged), 'broadcast' (replica 0's "
    "goes to all) or 'per_replica' (each keeps its own, replica 0's survives); or "
    "synchronize it in loss_fn, with axis_name= of BatchNorm.",
}


def gradients(tree: PyTree) -> PyTree:
    """Names the gradients of one replica."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: gradient(leaf, jax.tree_util.keystr(path)), tree
    )


def gradient(leaf: jax.Array, name: str) -> jax.Array:
    """Names one gradient, that of `params` with this behind it."""
    return checkpoint_name(leaf, f"{GRADIENT}params{name}")


def alike(leaf: Any, name: str, averaged: bool) -> Any:
    """Names a leaf that must be the same everywhere, since no design averages it.

    Args:
        leaf: Of the new model state.
        name: How errors call it.
        averaged: Whether it would be averaged if it were a float.
    """
    unaveraged, unsynchronized = ALIKE
    return checkpoint_name(leaf, (unaveraged if averaged else unsynchronized) + name)


def aggregated(tree: PyTree, axis_name: str) -> PyTree:
    """Names what was made of the gradients of all replicas: no sum needs to follow."""
    name = AGGREGATED + axis_name
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), tree)


def values(tree: PyTree) -> PyTree:
    """Names what one replica made of its gradient, and which is none any more.

    Parameters that it has updated alone, say: to sum those is no sum of gradients.
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, VALUE), tree)


def constant(value: jax.Array) -> jax.Array:
    """Names a value that is always the same, whatever it is computed from."""
    return checkpoint_name(value, CONSTANT)
