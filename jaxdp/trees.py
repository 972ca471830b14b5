"""Small functions over whole trees of arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def where(condition: Any, tree: PyTree, other: PyTree) -> PyTree:
    """One tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), tree, other)


def stacked(tree: PyTree, sizes: tuple[int, ...]) -> PyTree:
    """One copy per device: leaves `[*sizes, ...]`."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*sizes, *x.shape)), tree)


def module_of(array: Any) -> Any:
    """NumPy for its arrays, or its counterpart in JAX."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp
