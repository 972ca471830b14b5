"""BatchNorm over the real rows of all replicas: the numbers of one device.

The mean is the sum over all real rows of all replicas, divided by their count, and the
variance is the mean squared distance from it, in a second pass: never negative, and
exact where E[x²] - E[x]² cancels. `flax.nnx.BatchNorm` with `axis_name` averages the
means of the replicas instead, which is another number as soon as padding leaves them
unequal counts.

Inside `jaxdp.data_parallel` all replicas keep the same running averages. Their sums are
part of the loss, so that its gradient sums too, and equals that of one device.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
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


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` whose statistics are those of all real rows, once each.

    It takes the same arguments and keeps the same variables, with two differences: the
    `mask` of a call has one entry per row, and a variance always takes two passes,
    whatever `use_fast_variance` says. As in Flax, the running variance is the biased
    one, and `momentum` is the share that stays. A batch without any real row leaves the
    running averages alone. Outside `shard_map`, under `jit`, leave out `axis_name`.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> from flax import nnx
        >>> norm = jaxdp.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
        >>> _ = norm(jnp.array([[1.0], [3.0], [9.0]]), mask=jnp.arange(3) < 2)
        >>> print(norm.mean[...], norm.var[...])
        [2.] [1.]
    """

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: ArrayLike | None = None,
    ) -> jax.Array:
        """Normalizes, and moves the running averages unless it uses them.

        Args:
            x: `[rows, ..., features]`, or with the features on the module's `axis`.
            use_running_average: Whether to normalize by the running averages, as in
                inference; None asks the module.
            mask: As of `batch_moments`; padded rows are normalized too, and count for
                nothing.

        Returns:
            Array of the shape of `x`.
        """
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is not False:  # None: Flax says what is missing
            return super().__call__(x, use_running_average)
        scale, bias = (v if v is None else v[...] for v in (self.scale, self.bias))
        x, _, _, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype
        )
        mean, var, count = batch_moments(
            x,
            mask,
            self.axis_name,
            axis=self.axis,
            axis_index_groups=self.axis_index_groups,
        )
        for average, value in ((self.mean, mean), (self.var, var)):
            old = average[...]
            new = self.momentum * old + (1 - self.momentum) * value
            average[...] = lax.stop_gradient(
                jnp.where(count > 0, new, old).astype(old.dtype)
            )
        factor = lax.rsqrt(var + self.epsilon)
        factor = factor if scale is None else factor * scale
        shape = [1] * x.ndim
        shape[self.axis] = -1
        y = (x - mean.reshape(shape)) * factor.reshape(shape)
        y = y if bias is None else y + bias.reshape(shape)
        return y.astype(x.dtype)


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
