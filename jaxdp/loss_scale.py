"""Loss scales: what a 16-bit step carries, and how it changes from step to step.

float16 flushes values below 2^-25 to zero and overflows above 65,504: a loss scale
lifts gradients into its range, and a dynamic one finds out how far. A step with a
gradient that is not finite is skipped on all replicas, and the scale backs off; after
`growth_interval` good steps in a row it grows. It stays between `min_scale` and
`max_scale`. Powers of two make scaling and unscaling exact.

Why not Flax's `DynamicScale`: it computes the gradient, averages it by `pmean` and
updates its scale in one function, so that no other exchange fits in between, and it
knows no cap, no floor that fails, and not which gradient overflowed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

if TYPE_CHECKING:
    from jaxdp.precision import Precision

PyTree = Any


class LossScale(NamedTuple):
    """What a loss scale carries from step to step, the same on all replicas.

    Attributes:
        scale: `[]`, float32, what the loss of the next step is multiplied by.
        good_steps: `[]`, int32, steps since the scale changed, or could not.
        skipped: `[]`, int32, steps skipped in all.
        failed_step: `[]`, int32, the first step that overflowed at the floor, or -1.
        failed_leaf: `[]`, int32, the first leaf that was not finite in it, or -1.
    """

    scale: Any
    good_steps: Any
    skipped: Any
    failed_step: Any
    failed_leaf: Any


def unscaled(gradients: PyTree, scale: jax.Array | None) -> PyTree:
    """Divides gradients by the scale of their loss, in float32 or wider.

    Every replica divides its own, before they are summed: so sums cannot overflow
    because of the scale, and replicas with other scales would still agree.
    """
    if scale is None:
        return gradients

    def divide(leaf):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        return (wide / scale).astype(leaf.dtype)

    return jax.tree.map(divide, gradients)


def next_loss_scale(
    precision: "Precision", state: LossScale, nonfinite_leaf: jax.Array, step: jax.Array
) -> LossScale:
    """The loss scale after a step: the rule of PyTorch's `GradScaler`, with limits.

    Devices: all must give the same `nonfinite_leaf`, that of the averaged gradients.

    Args:
        precision: The options.
        state: The loss scale of this step.
        nonfinite_leaf: `[]`, int32, as of `first_nonfinite`.
        step: `[]`, int32, how errors name this step.

    Returns:
        That of the next step; to the bit PyTorch's if float32 holds both factors.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> precision = jaxdp.precision.Precision("fp16", loss_scale="dynamic")
        >>> state = jaxdp.loss_scale.next_loss_scale(
        ...     precision, precision.initial(), jnp.array(2), jnp.array(0))
        >>> print(state.scale, state.skipped)
        32768.0 1
    """
    overflow = nonfinite_leaf >= 0
    skipped = state.skipped + overflow
    if not precision.dynamic:
        return state._replace(skipped=skipped)
    good_steps = jnp.where(overflow, 0, state.good_steps + 1)
    grows = good_steps >= precision.growth_interval
    larger = jnp.minimum(state.scale * precision.growth_factor, precision.max_scale)
    smaller = jnp.maximum(state.scale * precision.backoff_factor, precision.min_scale)
    scale = jnp.where(overflow, smaller, jnp.where(grows, larger, state.scale))
    fails = overflow & (state.scale <= precision.min_scale) & (state.failed_step < 0)
    return LossScale(
        scale,
        jnp.where(grows, 0, good_steps),
        skipped,
        jnp.where(fails, step, state.failed_step),
        jnp.where(fails, nonfinite_leaf, state.failed_leaf),
    )


def first_nonfinite(leaves: Sequence[jax.Array]) -> jax.Array:
    """The index of the first leaf with an element that is not finite, or -1.

    Cost: reads every element once.

    Args:
        leaves: Floating or complex arrays.

    Returns:
        `[]`, int32.
    """
    found = jnp.full((), -1, jnp.int32)
    for index, leaf in reversed([*enumerate(leaves)]):
        found = jnp.where(jnp.all(jnp.isfinite(leaf)), found, index)
    return found


def has_failed(state: LossScale) -> bool:
    """Whether gradients overflowed at the floor; waits for the step that says so."""
    return not isinstance(state.failed_step, Tracer) and int(state.failed_step) >= 0


def check_not_failed(state: LossScale, names: Sequence[str], caller: str) -> None:
    """Ends a run whose gradients overflow at the smallest scale.

    Waits until the step that made the state is done; on tracers it does nothing.

    Args:
        state: The loss scale.
        names: Of the leaves of the parameters.
        caller: Whom the error speaks for.

    Raises:
        FloatingPointError: It has failed; names the step and the leaf.
    """
    if not has_failed(state):
        return
    raise FloatingPointError(
        f"{caller} got a state whose loss scale was at its floor, {state.scale:g}, "
        f"when step {state.failed_step} overflowed; {state.skipped} step(s) were "
        "skipped in all. Gradients must be finite at the smallest scale. The first "
        f"that was not is that of {names[int(state.failed_leaf)]}. Look for infinities "
        "in the batch, lower the learning rate, or compute in bf16; a smaller "
        "min_scale= only helps if the gradients overflow by a small factor."
    )
