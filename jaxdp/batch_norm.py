"""BatchNorm over the real rows of all replicas, as a Flax NNX module.

Inside `jaxdp.data_parallel` all replicas keep the same running averages, because
`jaxdp.batch_moments` gives all of them the same statistics.

This module is imported when `jaxdp.BatchNorm` is first asked for: Flax NNX takes a
quarter of the time that JAX does.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import ArrayLike

from jaxdp.normalization import batch_moments


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
