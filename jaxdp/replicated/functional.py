"""Scatter, replicate, apply and gather, with gradients: the pieces of `DataParallel`.

Each is a program of the host that starts work on devices and waits for nothing; each
has a gradient in reverse mode, which starts the opposite work.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.buckets import is_key
from jaxdp.mesh import without_mesh
from jaxdp.replicated import replicas as side_by_side
from jaxdp.replicated import transfers
from jaxdp.replicated.devices import Device, name, resolve, resolve_one
from jaxdp.replicated.inputs import (
    check,
    check_dim,
    check_traced,
    chunk_sizes,
    is_array,
    value_of,
)
from jaxdp.replicated.moves import Devices, Gather, Replicate, Scatter, fan_in, fan_out
from jaxdp.replicated.programs import flatten

PyTree = Any
Arrays = list[Any]


@without_mesh
def scatter(x: PyTree, device_ids: Sequence[Any], dim: int = 0) -> list[PyTree]:
    """Splits all arrays of a tree along `dim` and sends slice i to device i.

    Cost: every row is sent once, except those that lie on their device already.

    Args:
        x: Any nesting of arrays `[..., rows, ...]` and other leaves, which go to every
            device as they are. A typed PRNG key without axes becomes another key on
            every device.
        device_ids: Ids or devices; their order is that of the slices.
        dim: The dimension to split.

    Returns:
        One tree per slice. All slices but the last have ceil(rows / N) rows, so that
        there can be fewer slices than devices.

    Raises:
        TypeError: Leaves that look like data and are none.
        ValueError: No array, `dim` out of range, arrays of different length, no rows,
            or devices that do not exist.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> slices = jaxdp.replicated.scatter({"x": jnp.arange(6.0)}, [0, 1, 2, 3])
        >>> [part["x"].tolist() for part in slices]
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    devices = resolve(device_ids, "scatter")
    rows = check(x, dim, "scatter", "x")
    leaves, structure = jax.tree.flatten(x)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    parts, _ = split([leaves[i] for i in places], devices, dim, rows)
    return [_merged(structure, leaves, places, part) for part in parts]


@without_mesh
def replicate(params: PyTree, device_ids: Sequence[Any]) -> list[PyTree]:
    """Copies all arrays of a tree to every device.

    The gradient is the sum of the replicas' gradients, on the first device.

    Cost: N - 1 copies of the tree leave the first device.

    Args:
        params: Any nesting of arrays; other leaves go along as they are.
        device_ids: Ids or devices. Arrays that are not on the first go there first.

    Returns:
        One tree per device; the first shares the arrays that were there.

    Raises:
        ValueError: Devices that do not exist, or one twice.
    """
    devices = resolve(device_ids, "replicate")
    check_traced(params, "replicate", "params")
    leaves, structure = jax.tree.flatten(params)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    copies = copy([leaves[i] for i in places], devices)
    return [_merged(structure, leaves, places, part) for part in copies]


@without_mesh
def parallel_apply(
    apply_fn: Callable[..., Any],
    replicas: Sequence[PyTree],
    inputs: Sequence[Sequence[Any]],
    keywords: Sequence[dict[str, Any]] | None = None,
) -> list[PyTree]:
    """Calls `apply_fn(replica, *inputs, **keywords)` on every replica's device.

    Args:
        apply_fn: Any function that JAX can compile.
        replicas: Parameters, as `replicate` returns them.
        inputs: For each replica a tuple of positional inputs, on its device.
        keywords: For each replica its keyword inputs.

    Returns:
        For each replica its output, on its device; computed side by side.

    Raises:
        ValueError: Numbers of replicas, inputs and keywords differ, arrays of a replica
            lie on different devices, or `apply_fn` brought arrays from another device.
        Exception: What `apply_fn` raised, with the replica and its device named.
    """
    each = [{}] * len(inputs) if keywords is None else keywords
    if not len(replicas) == len(inputs) == len(each):
        raise ValueError(
            f"parallel_apply got {len(replicas)} replicas, {len(inputs)} inputs and "
            f"{len(each)} keywords. It needs one of each per device. Replicate to as "
            "many devices as there are slices: device_ids[:len(inputs)]."
        )
    wholes = [
        (params, None, tuple(arguments), named)
        for params, arguments, named in zip(replicas, inputs, each, strict=True)
    ]
    check_traced(wholes, "parallel_apply", "replicas")
    about = ("parallel_apply", "parameters and inputs")
    devices = tuple(_device_of(whole, i, *about) for i, whole in enumerate(wholes))
    pairs = [flatten(apply_fn, whole, devices) for whole in wholes]
    calls, arrays = [call for call, _ in pairs], [given for _, given in pairs]
    return [output for output, _ in side_by_side.predict(calls, arrays, devices)]


@without_mesh
def gather(outputs: Sequence[PyTree], output_device: Any, dim: int = 0) -> PyTree:
    """Joins the replicas' outputs on one device, leaf by leaf.

    The gradient goes back to the replicas, each slice to its device.

    Cost: every output is sent once, except those that lie there already.

    Args:
        outputs: One tree per replica, all of one structure. Arrays are joined along
            `dim`, scalars stacked to `[N]`.
        output_device: Id or device, any of this process.
        dim: The dimension to join along.

    Returns:
        One tree, on the output device.

    Raises:
        ValueError: No outputs, trees of different structure, arrays that cannot be
            joined, or a device that does not exist.
    """
    device = resolve_one(output_device, "output_device", "gather")
    check_dim(dim, "gather")
    outputs = list(outputs)
    check_traced(outputs, "gather", "outputs")
    if not outputs:
        raise ValueError(
            "gather got 0 outputs. It needs at least 1. Pass what parallel_apply "
            "returned."
        )
    sources = tuple(
        _device_of(output, i, "gather", "outputs") for i, output in enumerate(outputs)
    )
    return collect(outputs, sources, device, dim)


def split(
    arrays: Arrays, devices: Devices, dim: int, rows: int
) -> tuple[list[Arrays], list[int]]:
    """Scatters arrays; returns for each slice its arrays, and the sizes."""
    sizes = chunk_sizes(rows, len(devices))
    used = devices[: len(sizes)]
    sources = [transfers.where(array) for array in arrays]

    def make(indices):
        chosen = tuple(sources[i] for i in indices)
        return Scatter(used, dim, tuple(sizes), chosen)

    return fan_out(arrays, make), sizes


def copy(arrays: Arrays, devices: Devices, what: str = "parameters") -> list[Arrays]:
    """Replicates arrays; returns for each device its copies."""
    return fan_out(arrays, lambda indices: Replicate(devices, what))


def copies(params: PyTree, model_state: PyTree, devices: Devices) -> list[Arrays]:
    """Replicates parameters and buffers, and gives every replica keys of its own.

    The root keeps its keys, since its buffers survive; replicas must not draw the same
    numbers.
    """
    parts = copy(jax.tree.leaves(params), devices)
    buffers = jax.tree.leaves(model_state)
    if not buffers:
        return parts
    copied = copy(buffers, devices, "buffers")
    for replica, part in enumerate(copied[1:], start=1):
        part[:] = [
            transfers.folded(leaf, replica) if is_key(leaf) else leaf for leaf in part
        ]
    return [[*own, *part] for own, part in zip(parts, copied, strict=True)]


def collect(
    outputs: Sequence[PyTree], devices: Devices, output_device: Device, dim: int
) -> PyTree:
    """Gathers trees of one structure."""
    move, parts, structure = gathering(outputs, devices, output_device, dim)

    def make(indices):
        return Gather(
            devices, output_device, dim, tuple(move.sizes[i] for i in indices)
        )

    return jax.tree.unflatten(structure, fan_in(parts, make))


def gathering(
    outputs: Sequence[PyTree], devices: Devices, output_device: Device, dim: int
) -> tuple[Gather, list[Arrays], Any]:
    """The checked move that joins outputs, their leaves, and their structure."""
    parts = [jax.tree.leaves(output) for output in outputs]
    structures = [jax.tree.structure(output) for output in outputs]
    for replica, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                f"gather got outputs of different structure: {structures[0]} from "
                f"{name(devices[0])} and {structure} from {name(devices[replica])} "
                f"(replica {replica}). All replicas must return one structure, leaf by "
                "leaf. Do not let it depend on the number of rows."
            )
    sizes = tuple(
        _joined_sizes(pieces, devices, dim, outputs[0], i)
        for i, pieces in enumerate(zip(*parts, strict=True))
    )
    return Gather(devices, output_device, dim, sizes), parts, structures[0]


def _joined_sizes(
    pieces: Sequence[Any], devices: Devices, dim: int, output: PyTree, leaf: int
) -> tuple[int, ...] | int:
    """Sizes along `dim` of the pieces of one leaf; of scalars their number."""
    shapes = [np.shape(piece) for piece in pieces]
    if set(shapes) == {()}:
        return len(pieces)
    fits = all(-len(shape) <= dim < len(shape) for shape in shapes)
    others = {
        (*shape[:dim], *shape[dim:][1:], piece.dtype)
        for shape, piece in zip(shapes, pieces, strict=True)
    }
    if not fits or len(others) > 1:
        listed = ", ".join(
            f"{piece.dtype}{list(shape)} from {name(device)}"
            for piece, shape, device in zip(pieces, shapes, devices, strict=True)
        )
        path, _ = jax.tree_util.tree_leaves_with_path(output)[leaf]
        raise ValueError(
            f"gather got outputs that cannot be joined along dim={dim}: "
            f"output{jax.tree_util.keystr(path)} is {listed}. They need that "
            "dimension, and otherwise one shape and dtype. Return arrays with one "
            "entry per row, or scalars, which are stacked."
        )
    return tuple(shape[dim] for shape in shapes)


def _device_of(tree: PyTree, replica: int, caller: str, what: str) -> Device:
    """The one device of a replica's arrays."""
    found = {
        device: None
        for leaf in jax.tree.leaves(tree)
        if isinstance(value := value_of(leaf), jax.Array)
        for device in value.devices()
    }
    if len(found) != 1:
        raise ValueError(
            f"{caller} got arrays of replica {replica} on {len(found)} devices"
            f" ({', '.join(sorted(map(name, found))) or 'none'}). All {what} of a "
            "replica must be on 1, its own. Make them with replicate and scatter for "
            "the same device_ids, or jax.device_put."
        )
    return next(iter(found))


def _merged(
    structure: Any, leaves: Arrays, places: list[int], arrays: Arrays
) -> PyTree:
    """A tree with the arrays at their places."""
    merged = list(leaves)
    for place, array in zip(places, arrays, strict=True):
        merged[place] = array
    return jax.tree.unflatten(structure, merged)
