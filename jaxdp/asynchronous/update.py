"""What becomes of gradients on the server: checked, inspected, averaged, applied.

Pure functions of arrays; who takes part in an update is decided by `Server`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxdp.asynchronous.reuse import reused
from jaxdp.buckets import is_key, is_summable
from jaxdp.executor import accumulation_dtype
from jaxdp.loss import Mean, divided

PyTree = Any


def like(params: PyTree, gradients: PyTree, caller: str) -> PyTree:
    """The gradients as arrays of the parameters' types.

    Raises:
        ValueError: Structure, shapes or dtypes differ; names all leaves that do.
    """
    expected, structure = jax.tree.flatten(params)
    given = jax.tree.structure(gradients)
    if given != structure:
        raise ValueError(
            f"{caller} got gradients of structure {given}. They must be like the "
            f"parameters, {structure}. Push jax.grad(loss_fn)(snapshot.params, batch)."
        )
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    bad = [
        f"{jax.tree_util.keystr(path) or 'the only leaf'} is {_type(leaf)} instead of "
        f"{_type(model)}"
        for (path, leaf), model in zip(leaves, expected, strict=True)
        if jnp.shape(leaf) != model.shape or jnp.result_type(leaf) != model.dtype
    ]
    if bad:
        raise ValueError(
            f"{caller} got gradients unlike the parameters. Shapes and dtypes must be "
            f"the same: {'; '.join(bad)}. Push jax.grad(loss_fn)(snapshot.params, "
            "batch)."
        )
    arrays = [
        jnp.asarray(leaf, model.dtype)
        for (_, leaf), model in zip(leaves, expected, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def _type(leaf: Any) -> str:
    """Dtype and shape, such as "float32[2,3]"."""
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}".replace(" ", "")


@jax.jit
def inspect(gradients: PyTree, loss: Mean | None) -> tuple[Any, Any]:
    """Whether a push can be applied, and its loss.

    Args:
        gradients: Of the loss, or of its total.
        loss: None for a push that came without.

    Returns:
        Bool, `[]`: everything is finite, and a weight positive. The loss, total over
        weight; None without one.
    """
    leaves = [leaf for leaf in jax.tree.leaves((gradients, loss)) if is_summable(leaf)]
    good = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
    if loss is None:
        return good, None
    if loss.weight is not None:
        good &= loss.weight > 0
    return good, divided(loss)


def average(gradients: Sequence[PyTree], weights: Sequence[Any]) -> PyTree:
    """The sum of gradients of totals, over the sum of weights.

    Args:
        gradients: One tree per push.
        weights: One per push. None, for a single push, does not divide.

    Returns:
        The average, in the dtypes of the gradients. Sums are made in float32 or wider,
        in the order given.
    """
    if len(gradients) == 1:  # the bits that a single device would have
        return jax.tree.map(lambda g: divided(Mean(g, weights[0])), gradients[0])
    weight = sum(weights[1:], weights[0])

    def leaf_average(*leaves):
        wide = [leaf.astype(accumulation_dtype(leaf.dtype)) for leaf in leaves]
        total = sum(wide[1:], wide[0])
        return divided(Mean(total, weight)).astype(leaves[0].dtype)

    return jax.tree.map(leaf_average, *gradients)


@reused
def init_program(
    optimizer: optax.GradientTransformation,
) -> Callable[[PyTree], PyTree]:
    """The program `opt_state = init(params)`."""
    return jax.jit(lambda params: jax.tree.map(strong, optimizer.init(params)))


@reused
def update_program(
    optimizer: optax.GradientTransformation,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """The program of one update.

    Returns:
        `params, opt_state = update(params, opt_state, gradients, weights, staleness,
        stale_params)`, of the gradients and weights of the pushes that make it.
    """
    transformation = optax.with_extra_args_support(optimizer)

    @jax.jit
    def update(params, opt_state, gradients, weights, staleness, stale_params):
        updates, opt_state = transformation.update(
            average(gradients, weights),
            opt_state,
            params,
            staleness=staleness,
            stale_params=stale_params,
        )
        return jax.tree.map(strong, (optax.apply_updates(params, updates), opt_state))

    return update


def strong(leaf: Any) -> Any:
    """The leaf without a weak type, which would compile the next program anew."""
    if is_key(leaf):
        return leaf
    return lax.convert_element_type(leaf, jnp.result_type(leaf))
