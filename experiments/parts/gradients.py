"""Ways to combine the gradients of replicas, beside the full batch's gradient."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.harness.result import Rows
from jaxdp.replicated.inputs import chunk_sizes

PyTree = Any
SUM = "sum of gradients of the global mean"
WEIGHTED = "local means, weighted by their rows"
PLAIN = "local means, plain average"


def combine(
    losses: Callable[[PyTree, Any, Any], jax.Array],
    params: PyTree,
    images: np.ndarray,
    labels: np.ndarray,
    devices: int,
) -> Rows:
    """Compares three combinations.

    Args:
        losses: `losses(params, images, labels)`: one loss per row.
        params: Where the gradients are taken.
        images: `[rows, ...]`.
        labels: `[rows]`.
        devices: Number of replicas.

    Returns:
        One row per combination; differences relative to the largest entry of the full
        batch's gradient.
    """
    total = len(labels)

    @jax.jit
    @jax.grad
    def gradient_of(params, images, labels, divisor):
        return losses(params, images, labels).sum() / divisor

    def gradient(part: slice, divisor: int) -> PyTree:
        return gradient_of(params, images[part], labels[part], divisor)

    sizes = chunk_sizes(total, devices)
    ends = list(itertools.accumulate(sizes))
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    full = gradient(slice(0, total), total)
    shares = [gradient(part, total) for part in parts]
    means = [gradient(part, size) for part, size in zip(parts, sizes, strict=True)]
    combinations = {
        SUM: _weighted(shares, [1.0] * len(parts)),
        WEIGHTED: _weighted(means, [size / total for size in sizes]),
        PLAIN: _weighted(means, [1 / len(parts)] * len(parts)),
    }
    return [
        {
            "rows": f"{total} = {'+'.join(map(str, sizes))}",
            "combination": name,
            "relative difference": difference(combined, full),
        }
        for name, combined in combinations.items()
    ]


def difference(tree: PyTree, reference: PyTree) -> float:
    """Largest absolute difference over the largest entry of the reference."""
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), tree, reference)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(reference))
    return max(map(float, jax.tree.leaves(apart))) / largest


def share(tree: PyTree, reference: PyTree) -> float:
    """How much of a reference is in a tree, along the reference: 1 is all of it."""

    def product(one, other):
        products = jax.tree.map(lambda a, b: np.vdot(a, b), one, other)
        return sum(map(float, jax.tree.leaves(products)))

    return product(tree, reference) / product(reference, reference)


def _weighted(trees: list[PyTree], weights: list[float]) -> PyTree:
    """The weighted sum of trees."""

    def add(*leaves):
        return sum(w * leaf for w, leaf in zip(weights, leaves, strict=True))

    return jax.tree.map(add, *trees)
