"""What a server makes of the gradients of its workers, other than their sum.

Each is for `ParameterServer(aggregate=...)`: a function of a tree with leaves
`[W, ...]`, the gradient of each worker's own mean loss, that returns one gradient.
`median` and `trimmed_mean` bear workers that push nonsense (Yin, Chen, Kannan,
Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
ICML 2018, definitions 1 and 2); they differ from the gradient of the global loss. A
function of your own is as good.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.executor import accumulation_dtype

PyTree = Any


def median(gradients: PyTree) -> PyTree:
    """The median over workers, element by element.

    Args:
        gradients: Leaves `[W, ...]`, real, one entry per worker.

    Returns:
        Leaves without that axis, of the same dtypes.
    """
    return jax.tree.map(
        lambda x: jnp.median(x.astype(accumulation_dtype(x.dtype)), 0).astype(x.dtype),
        gradients,
    )


def trimmed_mean(trim: int) -> Callable[[PyTree], PyTree]:
    """The mean over workers without the largest and smallest values of each element.

    Args:
        trim: How many values to leave out at each end, at least 0.

    Returns:
        The aggregate, for leaves `[W, ...]`, real, with W > 2 `trim`.

    Raises:
        ValueError: `trim` is negative. From the aggregate: too few workers.
    """
    if trim < 0:
        raise ValueError(
            f"trimmed_mean got trim={trim}. It is how many workers to leave out at "
            "each end, so at least 0. Use 0 for the plain mean."
        )

    def aggregate(leaf):
        workers = leaf.shape[0]
        if workers <= 2 * trim:
            raise ValueError(
                f"trimmed_mean({trim}) got the gradients of {workers} workers. It "
                f"leaves out 2 x {trim} = {2 * trim}, and one must remain. Use a trim "
                f"of at most {(workers - 1) // 2}."
            )
        kept = jnp.sort(leaf, 0)[trim : workers - trim]
        mean = jnp.mean(kept, 0, dtype=accumulation_dtype(leaf.dtype))
        return mean.astype(leaf.dtype)

    return lambda gradients: jax.tree.map(aggregate, gradients)


def clipped_mean(max_norm: float) -> Callable[[PyTree], PyTree]:
    """The mean over workers of gradients clipped to a global norm, worker by worker.

    Args:
        max_norm: The largest norm that a worker's whole gradient keeps, above 0.

    Returns:
        The aggregate, for leaves `[W, ...]`. It sees whole gradients, so it needs one
        server.

    Raises:
        ValueError: `max_norm` is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(
            f"clipped_mean got max_norm={max_norm}. A norm must be above 0 to leave "
            "anything. Use 1.0, for example."
        )

    def aggregate(gradients):
        leaves, structure = jax.tree.flatten(gradients)
        total, _ = optax.per_example_global_norm_clip(leaves, max_norm)
        means = jax.tree.map(
            lambda t, leaf: (t / leaf.shape[0]).astype(leaf.dtype), total, leaves
        )
        return jax.tree.unflatten(structure, means)

    return aggregate
