"""What the results of a step promise to be, and the proof that they are.

`jaxdp.guard` follows gradients through the traced program; here is what it must find.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as P

from jaxdp import guard
from jaxdp.designs.base import Design
from jaxdp.state import TrainState
from jaxdp.trees import place

PyTree = Any


def prove(
    program: ClosedJaxpr,
    results: tuple[TrainState, dict[str, Any]],
    spec: TrainState,
    axis_names: Sequence[str],
    loss: Callable[[], ClosedJaxpr],
) -> None:
    """Proves that a step sums its gradients exactly once, over each axis of the mesh.

    Args:
        program: The traced step.
        results: Shapes of the new state and of metrics.
        spec: How a state lies on the mesh.
        axis_names: Of the mesh.
        loss: Traces the loss; called once, if at all.

    Raises:
        ValueError: Names the result, the gradient and the fault; or the loss waits for
            devices that compute none.
    """
    design, promised = spec.design, _promised(results, spec)
    loss = functools.cache(loss)
    for axis_name in axis_names:
        if design.serving_ranks:
            _check_alone(loss(), axis_name, design)
        loss_sums = functools.partial(_sums, loss, axis_name)
        guard.check_summed_once(program, axis_name, promised, loss_sums)


def _promised(
    results: tuple[TrainState, dict[str, Any]], spec: TrainState
) -> list[guard.Alike | guard.Summed | None]:
    """For each result its name, as what it must be; None if it may be anything."""
    new, metrics = jax.tree_util.tree_map_with_path(
        lambda path, _: place(path[1:]), results
    )
    in_parts = spec.design.in_parts

    def promise(part: P, names: PyTree) -> PyTree:
        if part == P():
            return jax.tree.map(guard.Alike, names)
        return jax.tree.map(lambda n: guard.Summed(n) if in_parts(n) else "", names)

    new = jax.tree.map(promise, spec, new, is_leaf=lambda part: isinstance(part, P))
    metrics = jax.tree.map(lambda name: guard.Alike(f"metrics{name}"), metrics)
    return [name or None for name in jax.tree.leaves((new, metrics))]


def _sums(loss: Callable[[], ClosedJaxpr], axis_name: str) -> bool:
    """Whether the loss itself sums over an axis."""
    return guard.sums_over(loss(), axis_name)


def _check_alone(loss: ClosedJaxpr, axis_name: str, design: Design) -> None:
    """Refuses a loss in which workers wait for devices that compute none.

    Raises:
        ValueError: The loss communicates.
    """
    if guard.talks_over(loss, axis_name):
        raise ValueError(
            f"data_parallel got a loss_fn that communicates over axis {axis_name!r}, "
            f"and a design whose first {design.serving_ranks} rank(s) only serve: they "
            "compute no loss, so the others would wait for ever. Remove the collective "
            "from loss_fn (axis_name= of BatchNorm is one), or let the servers work "
            "with dedicated=False."
        )
