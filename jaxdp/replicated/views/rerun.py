"""The programs of a step once more, as functions to be evaluated piece by piece.

They compute what the programs of a step compute, and take their arrays as one argument.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.buckets import is_summable
from jaxdp.loss import Mean, divided
from jaxdp.replicated import transfers
from jaxdp.replicated.gathered_loss import loss_and_cotangents
from jaxdp.replicated.programs import Call

PyTree = Any
Arrays = list[Any]


def forward_of(call: Call, trained: int) -> Callable[[Arrays], Any]:
    """The forward program of training."""
    return lambda arrays: _vjp(call, trained, arrays)[0]


def backward_of(call: Call, trained: int) -> Callable[[tuple[Arrays, Arrays]], Any]:
    """The forward program and the backward program, for arrays and cotangents."""

    def run(given):
        arrays, cotangents = given
        _, pullback = _vjp(call, trained, arrays)
        return pullback(cotangents)

    return run


def loss_of(
    loss_fn: Callable[..., Any], structure: Any, dim: int
) -> Callable[[tuple[list[Arrays], PyTree]], tuple[Any, ...]]:
    """Loss, metrics, weight and cotangents, of outputs and targets."""

    def run(given):
        parts, targets = given
        means, cotangents = loss_and_cotangents(
            loss_fn, structure, dim, None, parts, targets
        )
        metrics = {key: divided(mean) for key, mean in means.items()}
        return metrics.pop("loss"), metrics, means["loss"].weight, cotangents

    return run


def mean(given: tuple[list[Arrays], jax.Array | None]) -> Arrays:
    """The sum of the replicas' gradients over the weight."""
    parts, weight = given
    return [divided(Mean(leaf, weight)) for leaf in transfers.add(parts)]


def _vjp(call: Call, trained: int, arrays: Arrays) -> tuple[Any, Any]:
    """What a replica makes, and the pullback to its first arrays, as in a step."""

    def run(own):
        output, state = call([*own, *arrays[trained:]])
        smooth = [leaf for leaf in jax.tree.leaves(output) if is_summable(leaf)]
        return smooth, (output, state)

    _, pullback, made = jax.vjp(run, arrays[:trained], has_aux=True)
    return made, pullback
