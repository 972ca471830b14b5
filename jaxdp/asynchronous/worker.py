"""What a worker computes: one program, the loss of a batch and its gradient."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.asynchronous.reuse import reused
from jaxdp.loss import Aux, Mean, split_loss
from jaxdp.mesh import without_mesh

PyTree = Any


@reused
def loss_and_gradients(
    loss_fn: Callable[[PyTree, PyTree], Any],
) -> Callable[[PyTree, PyTree], tuple[Mean, PyTree]]:
    """The program of all workers; each device that runs it compiles it once.

    Args:
        loss_fn: `loss_fn(params, batch)`, a scalar or `jaxdp.Mean`.

    Returns:
        `program(params, batch)`: the loss as a `Mean`, and the gradient of its total.

    Raises:
        TypeError: From the program: a loss that is none, or that comes with
            `jaxdp.Aux`.
        ValueError: From the program: a loss that is no scalar.
    """

    def total(params: PyTree, batch: PyTree) -> tuple[Any, Mean]:
        loss, aux = split_loss(loss_fn(params, batch))
        if aux != Aux():
            raise TypeError(
                "loss_fn returned jaxdp.Aux beside its loss. Asynchronous workers "
                "have no common step to average metrics or model state over. Return "
                "the loss alone, a scalar or jaxdp.Mean(total, weight)."
            )
        return loss.total, loss

    @jax.jit
    def program(params: PyTree, batch: PyTree) -> tuple[Mean, PyTree]:
        (_, loss), gradients = jax.value_and_grad(total, has_aux=True)(params, batch)
        return loss, gradients

    return without_mesh(program)
