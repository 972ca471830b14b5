"""Making up for gradients that arrive late, as links of an optax chain.

On an asynchronous parameter server a gradient was computed at weights that the server
has since updated `staleness` times. `scale_by_staleness` takes smaller steps along old
gradients: Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep
Learning", IJCAI 2016. `compensate_delay` estimates what the gradient would be at the
weights of now: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
Compensation", ICML 2017 (DC-ASGD). `jaxdp.asynchronous` passes both what they need.

Arithmetic is in float32 or wider, because squares of 16-bit gradients under- and
overflow. A complex leaf counts as two real ones. Leaves without a gradient (None,
masked by optax, integer) stay as they are.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.buckets import is_summable
from jaxdp.executor import accumulation_dtype

PyTree = Any


def scale_by_staleness() -> optax.GradientTransformationExtraArgs:
    """Divides updates by their staleness; those of staleness 0 or 1 stay as they are.

    Placed last in a chain it divides the learning rate, as in the paper. Placed first
    it divides the gradient: the same for plain SGD, but then momentum accumulates the
    divided gradients, and Adam, whose steps do not depend on the scale of gradients,
    only gives stale ones less weight than fresh ones.

    Returns:
        A stateless transformation. Its `update` needs `staleness=`, an integer scalar:
        how many updates the server made between the pull of the weights that the
        gradient was computed at and its application.

    Raises:
        ValueError: From `update`: `staleness` is missing or no scalar.

    Example:
        >>> import jax.numpy as jnp, jaxdp, optax
        >>> optimizer = optax.chain(jaxdp.scale_by_staleness(), optax.sgd(0.5))
        >>> updates, _ = optimizer.update(jnp.array([8.0]), optimizer.init(None),
        ...                               staleness=4)
        >>> print(updates)
        [-1.]
    """

    def update(updates, state, params=None, *, staleness=None, **extra_args):
        del params, extra_args
        if staleness is None or jnp.shape(staleness) != ():
            given = "no" if staleness is None else f"{jnp.shape(staleness)} values of"
            raise ValueError(
                f"scale_by_staleness got {given} staleness. It divides all updates by "
                "max(1, staleness), one number: how many updates the server made since "
                "the weights of this gradient were pulled. Call optimizer.update(..., "
                "staleness=s), through wrappers that pass extra arguments on."
            )
        divisor = jnp.maximum(staleness, 1)
        return _map(lambda leaf: leaf / divisor.astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


class DelayState(NamedTuple):
    """State of the adaptive `compensate_delay`.

    Attributes:
        mean_square: Moving mean of squared gradients, like the parameters but float32
            or wider; of complex leaves, of real and imaginary parts apart.
    """

    mean_square: PyTree


def compensate_delay(
    strength: float, decay: float | None = None, eps: float = 1e-7
) -> optax.GradientTransformationExtraArgs:
    """Moves a gradient g from the old weights it was computed at to those of now.

    To first order, that adds the Hessian times the way between them. The paper puts
    strength times the diagonal of g gᵀ for the Hessian:
    `g + strength * g * g * (params - stale_params)`. This is good where g gᵀ, averaged
    over examples, resembles the Hessian, such as for cross-entropy near its minimum.

    Cost: a few operations per element; with `decay`, as much memory as the parameters
    take in float32.

    Args:
        strength: λ of the paper, 0 or more: 0.04 there, or 2.0 with `decay`.
        decay: None for a constant λ (DC-ASGD-c). Else (DC-ASGD-a) λ is divided by
            `sqrt(mean_square + eps)` per element; `mean_square` is a moving mean of g²
            that starts at 0 and has this decay, from 0 to below 1: 0.95 in the paper.
        eps: Keeps that division finite.

    Returns:
        A transformation to be placed first in a chain. Its `update` needs `params`, the
        weights that the update will be applied to, and `stale_params=`, those that the
        gradient was computed at. Where they are equal, the updates stay as they are.

    Raises:
        ValueError: `strength` or `decay` is out of range. From `update`: `params` or
            `stale_params` is missing or not like the updates.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> transformation = jaxdp.compensate_delay(0.5)
        >>> updates, _ = transformation.update(  # 2 + 0.5 * 2 * 2 * (4 - 3)
        ...     jnp.array([2.0]), transformation.init(jnp.array([4.0])),
        ...     jnp.array([4.0]), stale_params=jnp.array([3.0]))
        >>> print(updates)
        [4.]
    """
    _check_range(strength, decay)

    def init(params):
        if decay is None:
            return optax.EmptyState()
        return DelayState(jax.tree.map(_wide_zeros, params))

    def update(updates, state, params=None, *, stale_params=None, **extra_args):
        del extra_args
        _check_like(updates, params, "params")
        _check_like(updates, stale_params, "stale_params")
        trees = (updates, params, stale_params)
        if decay is None:
            return _map(functools.partial(_compensated, strength), *trees), state
        mean = _map(functools.partial(_mean, decay), state.mean_square, updates)
        compensated = _map(
            lambda g, now, stale, m: _compensated(
                strength / jnp.sqrt(m + eps), g, now, stale
            ),
            *(*trees, mean),
        )
        return compensated, DelayState(mean)

    return optax.GradientTransformationExtraArgs(init, update)


def _compensated(strength: Any, g: Any, now: Any, stale: Any) -> Any:
    """As a factor that is exactly 1 without a delay; g * g alone could overflow."""
    return g * (1 + strength * g * (now - stale))


def _mean(decay: float, mean_square: Any, g: Any) -> Any:
    """The next moving mean of squares."""
    return decay * mean_square + (1 - decay) * g * g


def _map(function: Callable[..., jax.Array], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps a real function over floating leaves; those of `tree` keep their dtype."""

    def one(*leaves):
        if not all(map(_is_floating, leaves)):
            return leaves[0]
        dtype = accumulation_dtype(jnp.result_type(*leaves))
        wide = [jnp.asarray(leaf, dtype) for leaf in leaves]
        if jnp.issubdtype(dtype, jnp.complexfloating):
            result = jax.lax.complex(
                function(*map(jnp.real, wide)), function(*map(jnp.imag, wide))
            )
        else:
            result = function(*wide)
        return result.astype(jnp.result_type(leaves[0]))

    return jax.tree.map(one, tree, *rest, is_leaf=_is_absent)


def _is_absent(leaf: Any) -> bool:
    """Whether nothing is here, though other trees may have something."""
    return leaf is None or isinstance(leaf, optax.MaskedNode)


def _is_floating(leaf: Any) -> bool:
    """Whether a leaf has an update to work on."""
    return not _is_absent(leaf) and is_summable(leaf)


def _wide_zeros(leaf: Any) -> jax.Array:
    """Where squares of a 16-bit leaf can be summed."""
    dtype = jnp.result_type(leaf)
    wide = accumulation_dtype(dtype) if _is_floating(leaf) else dtype
    return jnp.zeros(jnp.shape(leaf), wide)


def _check_range(strength: Any, decay: Any) -> None:
    """Refuses numbers out of range; traced ones cannot be checked."""
    for name, value, below in (("strength", strength, None), ("decay", decay, 1)):
        if not isinstance(value, int | float):
            continue
        if not 0 <= value < (below or float("inf")):
            raise ValueError(
                f"compensate_delay got {name}={value}. It must be at least 0 and "
                f"{f'less than {below}' if below else 'finite'}. The paper uses "
                "strength 0.04 without decay, and 2.0 with decay 0.95. Start there."
            )


def _check_like(updates: PyTree, tree: PyTree, name: str) -> None:
    """Refuses weights that are missing or shaped unlike the updates."""
    if tree is None:
        raise ValueError(
            f"compensate_delay got no {name}. It multiplies by params - stale_params: "
            "the weights to update minus those the gradient was computed at. Call "
            "optimizer.update(gradients, state, params, stale_params=pulled), through "
            "wrappers that pass extra arguments on."
        )

    different = []

    def compare(path, update, weights):
        if not _is_floating(update):
            return
        if not jax.tree_util.all_leaves([weights]):
            raise ValueError("a node, and the update is a leaf")
        if jnp.shape(update) != jnp.shape(weights):
            shapes = f"{jnp.shape(weights)} instead of {jnp.shape(update)}"
            where = jax.tree_util.keystr(path) or "the only leaf"
            different.append(f"{where} has shape {shapes}")

    try:
        jax.tree_util.tree_map_with_path(compare, updates, tree, is_leaf=_is_absent)
    except ValueError:
        structures = [jax.tree.structure(each) for each in (tree, updates)]
        different.append("structure {} instead of {}".format(*structures))
    if different:
        raise ValueError(
            f"compensate_delay got {name} unlike the updates: {'; '.join(different)}. "
            "It multiplies them element by element, so every leaf with an update needs "
            f"weights of its shape. Pass as {name} the tree that was differentiated."
        )
