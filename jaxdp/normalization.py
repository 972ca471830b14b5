"""Statistics over the real rows of all replicas: the numbers of one device.

The mean is the sum over all real rows of all replicas, divided by their count, and the
variance is the mean squared distance from it, in a second pass: never negative, and
exact where E[x²] - E[x]² cancels. `flax.nnx.BatchNorm` with `axis_name` averages the
means of the replicas instead, which is another number as soon as padding leaves them
unequal counts.

Inside `jaxdp.data_parallel` their sums are part of the loss, so that its gradient sums
too, and equals that of one device.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


class Moments(NamedTuple):
    """Statistics of a batch, over all its axes but the features'.

    Attributes:
        mean: `[features]`, at least float32; 0 without any rows.
        var: `[features]`, biased: divided by `count`. Times count / (count - 1) it is
            what PyTorch keeps as its running variance.
        count: `[]`, how many values each feature has.
    """

    mean: jax.Array
    var: jax.Array
    count: jax.Array


def batch_moments(
    x: ArrayLike,
    mask: ArrayLike | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    axis: int = -1,
    axis_index_groups: Any = None,
) -> Moments:
    """Mean and variance of the real rows of all replicas.

    Devices: inside `shard_map` if there is an `axis_name`; all of the axis take part,
    also those without real rows, and all get the same moments.

    Cost: two all-reduces, of `features + 1` and `features` numbers, and as many in the
    backward pass.

    Args:
        x: `[rows, ..., features]`, real; statistics are taken in float32 or wider.
        mask: `[rows]`, or `[rows, positions]`, ...: bool, False where x only pads.
            None takes everything.
        axis_name: The mesh axis, or axes, to sum over; None for one device.
        axis: Which axis has the features, if not the last.
        axis_index_groups: Sums inside groups of ranks only, as `jax.lax.psum` does.

    Raises:
        ValueError: A mask of other axes than the first of `x`.
        TypeError: `x` is complex, or the mask not bool.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> x, mask = jnp.array([[1.0], [3.0], [5.0], [0.0]]), jnp.arange(4) < 3
        >>> mean, var, count = jaxdp.batch_moments(x, mask)
        >>> print(mean, var, count)
        [3.] [2.6666667] 3.0
    """
    x = jnp.asarray(x)
    axis %= x.ndim
    others = tuple(i for i in range(x.ndim) if i != axis)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"batch_moments got x of dtype {x.dtype}. A variance is taken of real "
            "values. Pass real and imaginary part as two features."
        )
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    keep, count = _kept(mask, x, axis)

    def total(values: jax.Array) -> jax.Array:
        if axis_name is None:
            return values
        return lax.psum(values, axis_name, axis_index_groups=axis_index_groups)

    sums = total(jnp.append(jnp.sum(jnp.where(keep, x, 0), others), count))
    count = sums[-1]
    some = jnp.maximum(count, 1)
    mean = sums[:-1] / some
    # A NaN in padding must not meet the square: its gradient would be 0 * NaN.
    apart = jnp.where(keep, x - jnp.expand_dims(mean, others), 0)
    return Moments(mean, total(jnp.sum(apart**2, others)) / some, count)


def _kept(
    mask: ArrayLike | None, x: jax.Array, axis: int
) -> tuple[jax.Array | bool, jax.Array | int]:
    """What of x is real, in a shape to select by, and how many values per feature."""
    if mask is None:
        return True, x.size // x.shape[axis]
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(
            f"batch_moments got a mask of dtype {mask.dtype}. Its entries say whether "
            "a row is real: bool. Pass the `mask=` that loss_fn received."
        )
    if not 1 <= mask.ndim <= axis or mask.shape != x.shape[: mask.ndim]:
        raise ValueError(
            f"batch_moments got x of shape {x.shape} with features on axis {axis}, and "
            f"a mask of shape {mask.shape}. The mask must have the first axes of x, "
            f"before the features: {x.shape[:1]} for rows. Pass the `mask=` that "
            "loss_fn received."
        )
    each = math.prod(x.shape[mask.ndim :]) // x.shape[axis]
    keep = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    return keep, jnp.sum(mask, dtype=x.dtype) * each
