"""Names of leaves: `params/dense/kernel`, as they stand on disk and in messages."""

from typing import Any

import jax

PyTree = Any


def named(tree: PyTree, root: str) -> dict[str, Any]:
    """The leaves of a tree by name, in its order.

    A name is the path, separated by slashes. If keys with slashes make two names the
    same, all are written with brackets instead, which never clash.
    """
    found = jax.tree_util.tree_leaves_with_path(tree)

    def names(simple):
        return [_name(path, root, simple) for path, _ in found]

    chosen = names(True)
    if len(set(chosen)) < len(chosen):
        chosen = names(False)
    return dict(zip(chosen, (leaf for _, leaf in found), strict=True))


def filled(like: PyTree, root: str, values: dict[str, Any]) -> PyTree:
    """The tree `like`, with the values of its names as leaves."""
    structure = jax.tree.structure(like)
    return structure.unflatten([values[name] for name in named(like, root)])


def listed(items: list[str], most: int = 8) -> str:
    """Some of them as a text, and how many more there are."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def _name(path: Any, root: str, simple: bool) -> str:
    """One name."""
    if not path:
        return root
    if simple:
        return f"{root}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
    return root + jax.tree_util.keystr(path)
