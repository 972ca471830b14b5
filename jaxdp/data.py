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
            not divide, or an unknown `remainder`.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> mesh = jaxdp.data_mesh(4)
        >>> padded = jaxdp.shard_batch(jnp.arange(6.0), mesh, remainder="pad")
        >>> print(padded.batch, padded.mask.sum())
        [0. 1. 2. 3. 4. 5. 4. 5.] 6
    """
    most_axes = design.most_axes if design else 1
    mesh = auto_mesh(mesh, axis_name, "shard_batch", most_axes)
    mesh = worker_mesh(mesh, design.serving_ranks if design else 0)
    if remainder not in ("error", "pad", "drop"):
        raise ValueError(
            f"shard_batch got remainder={remainder!r}. It must be 'error', 'pad' or "
            "'drop'."
        )
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
    sharding = rows_over(mesh)
    if all(getattr(x, "sharding", None) == sharding for x in jax.tree.leaves(batch)):
        return batch  # `device_put` would find that out in a tenth of a millisecond
    return jax.device_put(batch, sharding)


@functools.lru_cache(maxsize=64)
def rows_over(mesh: Mesh) -> NamedSharding:
    """Axis 0 split over all devices of a mesh."""
    return NamedSharding(mesh, P(mesh.axis_names))


def with_servers(batch: PyTree, mesh: Mesh, serving_ranks: int) -> PyTree:
    """A batch of the workers as arrays over the whole mesh; servers get nothing real.

    One program runs on all devices, so each must have an array. No row moves.

    Args:
        batch: From `shard_batch`, over `worker_mesh(mesh, serving_ranks)`.
        mesh: The whole mesh.
        serving_ranks: How many ranks of its first axis only serve.
    """
    sharding = rows_over(mesh)
    servers = [*mesh.devices[:serving_ranks].flat]

    def extend(leaf):
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        kind = next(iter(shards.values()))
        blanks = [_blank(kind.shape, kind.dtype, device) for device in servers]
        shape = (kind.shape[0] * mesh.size, *leaf.shape[1:])
        worked = [shards[d] for d in mesh.devices[serving_ranks:].flat if d in shards]
        return jax.make_array_from_single_device_arrays(
            shape, sharding, blanks + worked
        )

    return jax.tree.map(extend, batch)


@functools.lru_cache(maxsize=64)
def _blank(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
    """Zeros that nobody reads."""
    return jax.device_put(jnp.zeros(shape, dtype), device)


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
