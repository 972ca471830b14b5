"""What a loss function returns, and how losses of replicas become one.

The global loss is the sum of totals over the sum of weights, over all replicas. A loss
function that returns a bare scalar, the mean over its own rows, has weight 1: right
when all replicas hold equally many rows. One that counts rows or tokens returns a
`Mean`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp import trees
from jaxdp.executor import accumulation_dtype

PyTree = Any


class Mean(NamedTuple):
    """A mean that is not divided yet, so that it can be summed over replicas.

    Attributes:
        total: Sum of the values, a real floating scalar.
        weight: How many values, or the sum of their weights; a scalar that does not
            depend on the parameters.
    """

    total: Any
    weight: Any


class Aux(NamedTuple):
    """What a loss function returns beside the loss: `return loss, Aux(...)`.

    Attributes:
        metrics: Dict of scalars or arrays, averaged over replicas with the weight of
            the loss; an entry that is a `Mean` carries its own weight.
        model_state: The next model state, such as BatchNorm statistics. What becomes of
            it where replicas differ is a policy of `data_parallel`.
    """

    metrics: Mapping[str, Any] | None = None
    model_state: PyTree = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["gradients", "loss", "metrics", "model_state"],
    meta_fields=["ready"],
)
@dataclasses.dataclass(frozen=True)
class Contribution:
    """What one replica adds to a step; a design averages it over the replicas.

    Attributes:
        gradients: Gradient of the replica's total, like the parameters; None in place
            of those that need not travel, since they are zero or not read.
        loss: Total and weight of the loss; weight None stands for a static 1.
        metrics: Dict of such pairs.
        model_state: Pairs for float leaves, other leaves as they are; None if it is not
            to be averaged.
        ready: For every leaf of all these, when it is ready in the backward pass:
            numbers that sort (`jaxdp.backward.readiness`). Static.
    """

    gradients: PyTree
    loss: Mean
    metrics: dict[str, Mean]
    model_state: PyTree
    ready: tuple[int, ...] = ()


def masked_mean(values: jax.Array, mask: jax.Array) -> Mean:
    """The mean of the values of real rows, as a `Mean`.

    Args:
        values: `[rows, ...]`, floating, one loss per row (or per row and token).
        mask: `[rows]`, bool, False for rows that only pad.

    Returns:
        `Mean` of the total over real rows and of their number of values. A NaN in a
        padded row does not reach the total or its gradient with respect to `values`.

    Raises:
        ValueError: `mask` is not one bool per row of `values`.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> mean = jaxdp.masked_mean(jnp.array([1.0, 5.0, 7.0]),
        ...                          jnp.array([True, True, False]))
        >>> print(mean.total, mean.weight)
        6.0 2.0
    """
    if mask.ndim != 1 or mask.shape != values.shape[:1] or mask.dtype != bool:
        raise ValueError(
            f"masked_mean got values of shape {values.shape} and a mask of shape "
            f"{mask.shape} and dtype {mask.dtype}. The mask must be one bool per row, "
            f"{values.shape[:1]}. Pass the `mask=` that loss_fn received, and one "
            "value per row."
        )
    keep = mask.reshape(-1, *[1] * (values.ndim - 1))
    kept = jnp.where(keep, values, 0)
    per_row = values.size // max(values.shape[0], 1)
    dtype = accumulation_dtype(values.dtype)
    return Mean(jnp.sum(kept, dtype=dtype), jnp.sum(mask, dtype=dtype) * per_row)


def split_loss(output: Any) -> tuple[Mean, Aux]:
    """Checks and normalizes what a loss function returned.

    Returns:
        The loss as a `Mean` of floats, with weight None for a bare scalar, and its
        `Aux`.

    Raises:
        TypeError: Not a loss, or not floating.
        ValueError: Not a scalar.
    """
    aux = Aux()
    if type(output) is tuple and len(output) == 2 and isinstance(output[1], Aux):
        output, aux = output
    loss = output if isinstance(output, Mean) else Mean(output, None)
    weight = loss.weight if loss.weight is not None else 1.0
    for name, value in (("loss", loss.total), ("weight", weight)):
        if isinstance(value, tuple | list | dict) or not hasattr(value, "__array__"):
            if not isinstance(value, int | float):
                raise TypeError(
                    f"loss_fn returned {type(value).__name__} as its {name}. It must "
                    "return a floating scalar or jaxdp.Mean(total, weight), alone or "
                    "as (loss, jaxdp.Aux(metrics=..., model_state=...)). Wrap what "
                    "else it returns in jaxdp.Aux."
                )
        if jnp.shape(value) != ():
            raise ValueError(
                f"loss_fn returned a {name} of shape {jnp.shape(value)}. It must be a "
                "scalar, shape (). Average it with jnp.mean, or return "
                "jaxdp.Mean(total, weight)."
            )
    if not jnp.issubdtype(jnp.result_type(loss.total), jnp.floating):
        raise TypeError(
            f"loss_fn returned a loss of dtype {jnp.result_type(loss.total)}. It must "
            "be a real floating dtype to have a gradient. Compute it from floating "
            "values."
        )
    return _floating(loss), aux


def with_weight(loss: Mean, value: Any) -> Any:
    """A metric or state leaf as a pair to be summed, weighted as the loss is."""
    if isinstance(value, Mean):
        return _floating(value)
    if loss.weight is None:
        return _floating(Mean(value, None))
    return _floating(Mean(value * loss.weight, loss.weight))


def _floating(mean: Mean) -> Mean:
    """Counts become floats: what is summed over replicas must be one."""
    total = jnp.asarray(mean.total)
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        total = total.astype(jnp.float32)
    if mean.weight is None:
        return Mean(total, None)
    return Mean(total, jnp.asarray(mean.weight, accumulation_dtype(total.dtype)))


def divided(mean: Mean) -> Any:
    """Total over weight, in the total's dtype."""
    if mean.weight is None:
        return mean.total
    return (mean.total / mean.weight).astype(jnp.result_type(mean.total))


def check_loss(loss: Mean, aux: Aux, arguments: dict) -> None:
    """Checks a loss against the keywords that loss_fn received.

    Raises:
        ValueError: A bare scalar for a padded batch, an unexpected model state, or a
            metric that hides the loss.
    """
    if "mask" in arguments and loss.weight is None:
        raise ValueError(
            "loss_fn returned a bare scalar for a padded batch. Its padded rows "
            f"would count: the mask has {arguments['mask'].shape[0]} rows per device, "
            "not all real. Return jaxdp.masked_mean(values, mask), with one value "
            "per row."
        )
    if aux.model_state is not None and "model_state" not in arguments:
        raise ValueError(
            "loss_fn returned a model_state, and train.init got none. The state that a "
            "step returns must have the structure of the one it was given. Pass "
            "model_state= to train.init."
        )
    if aux.model_state is not None:
        _check_model_state(aux.model_state, arguments["model_state"])
    check_metrics(aux)


def _check_model_state(returned: PyTree, received: PyTree) -> None:
    """Checks that a step returns the leaves that it was given.

    Raises:
        ValueError: Names those that came, went or changed shape.
    """
    kinds = [jax.tree.structure(tree) for tree in (received, returned)]
    before, now = (
        {
            trees.place(path, "model_state"): jnp.shape(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (received, returned)
    )
    if kinds[0] == kinds[1] and before == now:
        return
    changes = [f"{name} is missing" for name in before if name not in now]
    changes += [f"{name} is new" for name in now if name not in before]
    changes += [
        f"{name} had shape {before[name]} and has {shape}"
        for name, shape in now.items()
        if before.get(name, shape) != shape
    ]
    raise ValueError(
        "loss_fn returned another model_state than it received: "
        f"{', '.join(changes) or f'it was {kinds[0]} and is {kinds[1]}'}. A step must "
        "return what it was given. Return every leaf, changed or not."
    )


def check_metrics(aux: Aux) -> None:
    """Checks that no metric hides the loss.

    Raises:
        ValueError: One has its name.
    """
    if "loss" in (aux.metrics or {}):
        raise ValueError(
            "loss_fn returned a metric named 'loss'. That name holds the loss in the "
            "metrics of a step. Rename it."
        )
