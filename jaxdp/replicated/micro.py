"""What a micro-batch leaves on the root and on the output device, and sums of it.

A step is one, unless less memory must do: see `jaxdp.replicated.microbatches`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.loss import Mean, divided
from jaxdp.replicated import observe, transfers
from jaxdp.replicated.transfers import Arrays

PyTree = Any


class Micro(NamedTuple):
    """What stages 2 to 8 of a micro-batch leave behind, before sum and optimizer.

    Attributes:
        gradients: Parts of the gradient of the total, on the root: of each replica, or
            one sum.
        results: The loss and the metrics, as pairs to be summed, on the output device.
        model_state: The root's buffers.
    """

    gradients: list[Arrays]
    results: dict[str, Mean]
    model_state: PyTree

    def summed(self) -> "Micro":
        """With one sum of gradients, in buffers of its own."""
        zeros = [jnp.zeros_like(g, device=g.sharding) for g in self.gradients[0]]
        return self._replace(gradients=[_add_to(zeros, self.gradients)])

    def plus(self, other: "Micro") -> "Micro":
        """Adds another one to this `summed` one, whose gradients are donated."""
        (total,) = self.gradients
        observe.settle()
        total = _add_to(total, other.gradients)
        results = _summed(self.results, other.results)
        return Micro([total], results, other.model_state)

    def metrics(self) -> dict[str, Any]:
        """Totals over weights."""
        if all(mean.weight is None for mean in self.results.values()):
            return {name: mean.total for name, mean in self.results.items()}
        return _divided(self.results)


def _add_to(total: Arrays, parts: list[Arrays]) -> Arrays:
    """Adds parts of a gradient to a sum, which is donated; told to observers."""
    began = observe.now()
    lower = functools.partial(_accumulate.lower, total, parts)
    total = _accumulate(total, parts)
    root = transfers.where(total[0])
    about = ("8 reduce", "sum of micro-batches", None, root, root, parts)
    observe.tell(*about, {"gradient": total}, began, lower)
    return total


@functools.partial(jax.jit, donate_argnums=0)
def _accumulate(total: Arrays, parts: list[Arrays]) -> Arrays:
    """Accumulated in one set of buffers, however many micro-batches there are."""
    return transfers.add([total, *parts])


@jax.jit
def _divided(results: dict[str, Mean]) -> dict[str, Any]:
    return {name: divided(mean) for name, mean in results.items()}


@jax.jit
def _summed(results: dict[str, Mean], others: dict[str, Mean]) -> dict[str, Mean]:
    return jax.tree.map(jnp.add, results, others)
