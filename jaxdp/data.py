"""Batches: split along axis 0 over the devices of a mesh."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.designs.base import Design
from jaxdp.mesh import auto_mesh, worker_mesh
from jaxdp.processes.batches import agreed_rows
from jaxdp.processes.values import devices_of_ranks, ranks_of

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """A batch with a mask of its real rows; `loss_fn` receives the mask as `mask=`.

    Attributes:
        batch: Pytree of arrays `[rows, ...]`.
        mask: `[rows]`, bool, False for rows that only pad.
    """

    batch: PyTree
    mask: jax.Array | np.ndarray


def shard_batch(
    batch: PyTree,
    mesh: Mesh,
    remainder: Literal["error", "pad", "drop"] = "error",
    *,
    axis_name: str | tuple[str, ...] | None = None,
    design: Design | None = None,
    accumulate: int = 1,
) -> PyTree:
    """Splits a batch along axis 0: rank r gets the r-th of N equal slices.

    Over several processes each gives its own rows, for its own devices; the processes
    agree on sizes first, so all must call it. With `"pad"` all pad to the largest, with
    `"drop"` all cut to the smallest.

    Args:
        batch: Pytree of host or device arrays `[rows, ...]`; arrays on other devices or
            meshes are moved.
        mesh: The mesh, with `N` devices.
        remainder: What to do if N does not divide the rows. `"error"` refuses. `"drop"`
            leaves out the last rows. `"pad"` repeats the last rows (copies of real
            rows, since a masked NaN is still a NaN in the gradient) and returns a
            `PaddedBatch`, always, so that whole and padded batches train with one loss
            function.
        axis_name: The mesh axis; None takes the mesh's only axis.
        design: The design that trains. It matters for `remainder` if some devices only
            serve and take no rows, or if workers own several devices.
        accumulate: Micro-batches of a step; rows are split, padded or dropped so that
            each device has a multiple of it.

    Returns:
        The tree as `jax.Array`s, sharded over the devices that take rows; for `"pad"`,
        a `PaddedBatch`.

    Raises:
        ValueError: No arrays or no rows, leaves of different length, rows that N does
            not divide, or an unknown `remainder`; processes that give devices other
            numbers of rows, which is said on all of them.
        TimeoutError: A process did not come; names all that did not.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> mesh = jaxdp.data_mesh(4)
        >>> padded = jaxdp.shard_batch(jnp.arange(6.0), mesh, remainder="pad")
        >>> print(padded.batch, padded.mask.sum())
        [0. 1. 2. 3. 4. 5. 4. 5.] 6
    """
    most_axes = design.most_axes if design else 1
    whole = auto_mesh(mesh, axis_name, "shard_batch", most_axes)
    mesh = worker_mesh(whole, design.serving_ranks if design else 0)
    return split_rows(batch, mesh, whole, remainder, accumulate)


def split_rows(
    batch: PyTree, mesh: Mesh, whole: Mesh, remainder: str, accumulate: int
) -> PyTree:
    """As `shard_batch`, for meshes that have been checked.

    Args:
        batch: As there, like all that follow.
        mesh: Of the devices that take rows.
        whole: With those that do not; its processes take part.
        remainder: What to do if N does not divide the rows.
        accumulate: Micro-batches of a step.
    """
    if remainder not in ("error", "pad", "drop"):
        raise ValueError(
            f"shard_batch got remainder={remainder!r}. It must be 'error', 'pad' or "
            "'drop'. Use 'pad' to train on every row."
        )
    sharding, leaves = rows_over(mesh), jax.tree.leaves(batch)
    placed = leaves and all(getattr(x, "sharding", None) == sharding for x in leaves)
    if placed and remainder == "error" and accumulate == 1:
        return batch  # `device_put` would find that out in a tenth of a millisecond
    if len(ranks_of(whole)) > 1 and _is_local(batch):
        return _of_processes(batch, mesh, whole, remainder, accumulate)
    parts = mesh.size * accumulate
    rows = _common_length(batch)
    if remainder == "pad":
        padded_rows = -(-rows // parts) * parts
        batch = jax.tree.map(lambda leaf: _pad(leaf, padded_rows), batch)
        batch = PaddedBatch(batch, np.arange(padded_rows) < rows)
    elif remainder == "drop" and rows >= parts:
        kept = rows // parts * parts
        batch = jax.tree.map(lambda leaf: leaf[:kept], batch)
    elif rows % parts:
        raise ValueError(_indivisible(rows, mesh.size, accumulate, remainder))
    return jax.device_put(batch, sharding)


def _is_local(batch: PyTree) -> bool:
    """Whether a batch is of this process alone."""
    leaves = jax.tree.leaves(batch)
    return all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves)


def _of_processes(
    batch: PyTree, mesh: Mesh, whole: Mesh, remainder: str, accumulate: int
) -> PyTree:
    """One batch of the rows that each process has for its own devices."""
    ranks = ranks_of(whole)
    local = mesh.local_devices
    given = _common_length(batch) if local else 0  # a process that only serves
    workers = devices_of_ranks(mesh, ranks)
    per_device = agreed_rows(given, workers, ranks, remainder, accumulate)
    rows = per_device * len(local)
    if remainder == "pad":
        batch = jax.tree.map(lambda leaf: _pad(leaf, rows) if local else leaf, batch)
        batch = PaddedBatch(batch, np.arange(rows) < given)
    sharding = rows_over(mesh)

    def placed(leaf):
        slices = leaf[:rows].reshape(len(local), per_device, *leaf.shape[1:])
        shards = [jax.device_put(*pair) for pair in zip(slices, local, strict=True)]
        return jax.make_array_from_single_device_arrays(
            (per_device * mesh.size, *leaf.shape[1:]),
            sharding,
            shards,
            dtype=leaf.dtype,
        )

    return jax.tree.map(placed, batch)


@functools.lru_cache(maxsize=64)
def rows_over(mesh: Mesh) -> NamedSharding:
    """Axis 0 split over all devices of a mesh."""
    return NamedSharding(mesh, P(mesh.axis_names))


def _common_length(batch: PyTree) -> int:
    """The number of rows that all leaves share."""
    starts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(starts) == 1 and (start := starts.pop()) and start[0]:
        return start[0]
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    lengths = {
        jax.tree_util.keystr(path) or "the batch": (np.shape(leaf) or (None,))[0]
        for path, leaf in leaves
    }
    listed = ", ".join(f"{path}: {n} rows" for path, n in lengths.items())
    if None in lengths.values():
        scalars = [path for path, n in lengths.items() if n is None]
        raise ValueError(
            f"shard_batch got leaves without axes: {', '.join(scalars)}. Every leaf "
            "is split along axis 0, so it needs one. Give arrays of shape [rows, "
            "...], and bind constants into loss_fn instead."
        )
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"shard_batch got leaves of different length: {listed}. All are split "
            "along axis 0 and must have equally many rows. Give every leaf one entry "
            "per row."
        )
    raise ValueError(
        f"shard_batch got an empty batch ({listed or 'no arrays'}). A step needs at "
        "least one row. Skip this batch."
    )


def _pad(leaf: Any, rows: int) -> Any:
    """Extends to `rows` rows by repeating rows, cyclically, from the end."""
    missing = rows - leaf.shape[0]
    if not missing:
        return leaf
    xp = jnp if isinstance(leaf, jax.Array) else np
    last = max(leaf.shape[0] - missing, 0) + np.arange(missing) % leaf.shape[0]
    return xp.concatenate([leaf, leaf[last]])


def _indivisible(rows: int, devices: int, accumulate: int, remainder: str) -> str:
    """The message for rows that cannot be split evenly."""
    parts = devices * accumulate
    whole, rest = divmod(rows, parts)
    up = (whole + 1) * parts
    micro = f" x {accumulate} micro-batches = {parts}" if accumulate > 1 else ""
    remedies = f"remainder='pad' (pads to {up} rows, and loss_fn receives a mask)"
    if whole:
        remedies += f", remainder='drop' (keeps {whole * parts} rows)"
        sizes = f"{whole * parts} or {up}"
    else:
        sizes = f"{up}"
    return (
        f"shard_batch got a batch of {rows} rows for {devices} devices{micro} with "
        f"remainder={remainder!r}. Every device takes equally many rows, and {rows} = "
        f"{parts} x {whole} + {rest}. Use {remedies}, or a batch size that {parts} "
        f"divides, such as {sizes}."
    )
