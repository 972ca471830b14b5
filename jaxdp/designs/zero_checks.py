"""What `Zero` refuses."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from jaxdp.designs.base import PyTree
from jaxdp.designs.update import Update
from jaxdp.zero.partition import unpartitionable

if TYPE_CHECKING:
    from jaxdp.designs.zero import Zero


def check_options(design: "Zero") -> None:
    """Refuses options that do not exist or do not fit each other.

    Raises:
        ValueError: Says which.
    """
    stage, prefetch = design.stage, design.prefetch
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(
            f"Zero got stage={stage!r}. It must be 1 (optimizer state in parts), 2 "
            "(gradients too) or 3 (parameters too). For stage 0, which is plain data "
            "parallelism, use jaxdp.RingAllReduce()."
        )
    whole = isinstance(prefetch, int | np.integer) and not isinstance(prefetch, bool)
    if not whole or prefetch < 0:
        raise ValueError(
            f"Zero got prefetch={prefetch!r}. It is a number of buckets, at least 0. "
            "Leave it out for 1: the next bucket travels while one is used."
        )
    if design.algorithm not in ("ring", "native"):
        raise ValueError(
            f"Zero got algorithm={design.algorithm!r}. It must be 'ring', rounds of "
            "jaxdp's own, or 'native', XLA's collectives."
        )
    if isinstance(design.layers, str) or not isinstance(design.layers, tuple):
        raise ValueError(
            f"Zero got layers={design.layers!r}. It must be a tuple of names. Write "
            "layers=('blocks',), for example."
        )
    if design.layers and stage != 3:
        raise ValueError(
            f"Zero got layers={design.layers!r} with stage={stage}. Layers are "
            "gathered one by one where parameters are in parts. Leave them out, or use "
            "stage=3."
        )


def check_compression(design: "Zero", sizes: tuple[int, ...]) -> None:
    """Refuses compression where it has no way to go.

    Raises:
        ValueError: A mesh with two axes, or layers that are reduced in a scan.
    """
    if design.compression is None:
        return
    if sizes[1:]:
        raise ValueError(
            f"Zero got {design.compression} and a mesh of shape {sizes}. "
            "Compressed gradients travel over one axis. Use a mesh with one "
            "axis, or no compression."
        )
    if design.layers:
        raise ValueError(
            f"Zero got {design.compression} and layers={design.layers!r}. Gradients of "
            "layers are reduced inside the scan, where nothing is compressed. Leave "
            "out one of the two."
        )


def check_layers(design: "Zero", params: PyTree) -> None:
    """Refuses names of layers that are not there, or hold no stack.

    Raises:
        ValueError: Says which names there are, or how their leaves begin.
    """
    if not design.layers:
        return
    found = jax.tree_util.tree_leaves_with_path(params)
    names = {name(path) for path, _ in found} if isinstance(params, dict) else set()
    if missing := [each for each in design.layers if each not in names]:
        listed = ", ".join(sorted(names)) or "none, as they are no dict"
        raise ValueError(
            f"Zero got layers={design.layers!r}, and the parameters have no "
            f"{missing[0]!r}. Layers are entries of a dict, at its top: {listed}."
        )
    for each in design.layers:
        stacks = {np.shape(leaf)[:1] for path, leaf in found if name(path) == each}
        if len(stacks) != 1 or () in stacks:
            raise ValueError(
                f"Zero got layers={design.layers!r}, and the leaves of {each!r} have "
                f"leading dimensions {sorted(stacks)}. All must have the same one, the "
                "number of layers. Stack the layers along axis 0."
            )


def check_optimizer(
    optimizer: optax.GradientTransformation, params: PyTree, devices: int
) -> None:
    """Refuses an optimizer that cannot run on parts.

    Raises:
        ValueError: Says which operation, on which shapes.
    """
    opt_state = jax.eval_shape(optimizer.init, params)
    why = unpartitionable(Update(optimizer).optimized, params, params, opt_state)
    if why:
        raise ValueError(
            f"Zero runs the optimizer in parts on {devices} devices, and {why}. Every "
            "operation of an optimizer must be one that a device can run by itself, on "
            "its parts or on gathered arrays. Take that out of the optimizer, or use "
            "jaxdp.RingAllReduce(), where every device runs all of it."
        )


def name(path: tuple[Any, ...]) -> str:
    """The top-level entry that a path leads into."""
    return jax.tree_util.keystr(path[:1], simple=True)
