"""Small functions over whole trees of arrays."""

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Path = tuple[Any, ...]  # of a leaf, as `jax.tree_util.tree_leaves_with_path` gives it


def own_parameter(path: Path, params: Container[Path]) -> Path | None:
    """Which parameter a leaf of an optimizer state belongs to, if any, by its path.

    The state of a parameter is in trees like that of the parameters, so that its path
    ends with the parameter's. The longest that fits is its own: `mu/dense/w` is of
    `dense/w`, where there is a `w` too.

    Args:
        path: Of the leaf.
        params: Paths of parameters.

    Returns:
        The path of the parameter; None if there is none.
    """
    ends = (path[start:] for start in range(len(path) + 1))
    return next((end for end in ends if end in params), None)


def place(path: Path, root: str = "") -> str:
    """Where a leaf stands, such as "params['w']" for a path below "params"."""
    return f"{root}{jax.tree_util.keystr(path)}".lstrip(".")


def where(condition: Any, tree: PyTree, other: PyTree) -> PyTree:
    """One tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), tree, other)


def stacked(tree: PyTree, sizes: tuple[int, ...]) -> PyTree:
    """One copy per device: leaves `[*sizes, ...]`."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*sizes, *x.shape)), tree)


def module_of(array: Any) -> Any:
    """NumPy for its arrays, or its counterpart in JAX."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp
