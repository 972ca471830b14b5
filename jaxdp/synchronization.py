"""Averaging gradients as a link of an optax chain, for training loops of one's own."""

import jax
import optax

from jaxdp.buckets import is_summable
from jaxdp.collectives import Algorithm, PyTree, all_reduce
from jaxdp.primitive import is_checked, varying_axes


def synchronize_gradients(
    axis_name: str, algorithm: Algorithm = "ring"
) -> optax.GradientTransformation:
    """Averages the updates that pass through it over the replicas.

    Devices: `update` must run inside `shard_map` or `pmap` over `axis_name`, on the
    gradients of each replica's own mean loss.

    Cost: that of `jaxdp.all_reduce`.

    Args:
        axis_name: The mesh axis.
        algorithm: As for `jaxdp.all_reduce`.

    Returns:
        A stateless transformation. Place it first: clipping and moments then see the
        average, as one device with the whole batch would.

    Raises:
        ValueError: From `update`: under `check_vma=True`, a gradient that is the same
            on all devices by its type. JAX sums the gradient of replicated parameters
            by itself there, so it would be summed twice.

    Example:
        >>> import jaxdp, optax
        >>> optimizer = optax.chain(
        ...     jaxdp.synchronize_gradients("data"), optax.adam(1e-3))
    """

    def update(updates, params=None):
        del params
        # First, because it refuses an axis that is not bound here.
        average = all_reduce(updates, axis_name, algorithm, mean=True)
        if is_checked(axis_name):
            _check_not_summed(updates, axis_name)
        return average

    return optax.stateless(update)


def _check_not_summed(updates: PyTree, axis_name: str) -> None:
    """Refuses gradients whose type says that they are the same on all devices."""
    summed = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
        if is_summable(leaf) and axis_name not in varying_axes(leaf)
    ]
    if summed:
        raise ValueError(
            "synchronize_gradients got gradients that are already summed over axis "
            f"{axis_name!r}: {', '.join(summed)}. Under check_vma=True jax.grad sums "
            "the gradient of replicated parameters by itself, and it must be summed "
            "exactly once. Differentiate with respect to jax.lax.pcast(params, "
            f"{axis_name!r}, to='varying'), or drop synchronize_gradients."
        )
