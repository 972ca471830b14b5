"""Stage 6: the loss on the gathered output, and its gradient for every replica."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.buckets import is_summable
from jaxdp.loss import Aux, Mean, check_metrics, split_loss, with_weight
from jaxdp.replicated import observe, transfers
from jaxdp.replicated.devices import Device, name
from jaxdp.replicated.transfers import Arrays

PyTree = Any


def gathered_loss(
    loss_fn: Callable[..., Any],
    structure: Any,
    dim: int,
    rows: int | None,
    parts: list[Arrays],
    targets: PyTree,
    device: Device,
) -> tuple[dict[str, Mean], list[Arrays]]:
    """Loss and metrics, and the gradient with respect to the replicas' outputs.

    Args:
        loss_fn: Of the gathered output and the targets.
        structure: Of the output.
        dim: The dimension along which outputs are joined.
        rows: Weight of a bare scalar loss; None for none.
        parts: The leaves of each replica's output, on the output device.
        targets: There too.
        device: The output device.
    """
    began = observe.now()
    args = (loss_fn, structure, dim, rows, parts, targets)
    try:
        results, cotangents = loss_and_cotangents(*args)
    except Exception as error:
        outputs, given = jax.tree.map(jnp.shape, (parts, targets))
        error.add_note(
            f"Raised by loss_fn, in stage 6 loss on {name(device)}. It got the "
            f"outputs of shapes {outputs}, joined along dim={dim}, and "
            f"targets of shapes {given}. Give targets that fit the gathered output."
        )
        raise
    about = ("6 loss", "loss and its gradient", None, device, device, parts)
    made = {"loss": results, "output gradients": cotangents}
    observe.tell(
        *about, made, began, functools.partial(loss_and_cotangents.lower, *args)
    )
    return results, cotangents


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def loss_and_cotangents(
    loss_fn: Callable[..., Any],
    structure: Any,
    dim: int,
    rows: int | None,
    parts: list[Arrays],
    targets: PyTree,
) -> tuple[dict[str, Mean], list[Arrays]]:
    """Joins the outputs; the cotangents of the join are the replicas' own."""
    leaves, inner = jax.tree.flatten(parts)
    smooth = [leaf for leaf in leaves if is_summable(leaf)]

    def total(smooth):
        given = iter(smooth)
        merged = [next(given) if is_summable(leaf) else leaf for leaf in leaves]
        whole = transfers.join(jax.tree.unflatten(inner, merged), dim)
        output = loss_fn(jax.tree.unflatten(structure, whole), targets)
        loss, aux = split_loss(output)
        _check_aux(aux)
        if rows is not None and loss.weight is None:
            weight = jnp.asarray(rows, loss.total.dtype)
            loss = Mean(loss.total * weight, weight)
        metrics = {
            name: with_weight(loss, value)
            for name, value in (aux.metrics or {}).items()
        }
        return loss.total, {"loss": loss, **metrics}

    (_, results), cotangents = jax.value_and_grad(total, has_aux=True)(smooth)
    each = len(cotangents) // len(parts)
    return results, [cotangents[i * each : (i + 1) * each] for i in range(len(parts))]


def _check_aux(aux: Aux) -> None:
    """Checks what a loss function returned beside the loss."""
    if aux.model_state is not None:
        raise ValueError(
            "loss_fn returned a model_state. It sees the gathered output only; buffers "
            "are the business of apply_fn, which gets model_state= if DataParallel did "
            "and returns (output, model_state). Return Aux(metrics=...) alone."
        )
    check_metrics(aux)
