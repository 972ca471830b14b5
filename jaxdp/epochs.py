"""The batches of an epoch on the devices of a mesh, all of one shape."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdp.data import PaddedBatch, rows_over
from jaxdp.designs.base import Design
from jaxdp.mesh import auto_mesh, worker_mesh
from jaxdp.processes.values import devices_of_ranks, ranks_of
from jaxdp.sampling import Rows, Sampler

PyTree = Any


def epoch_batches(
    data: PyTree,
    sampler: Sampler,
    mesh: Mesh,
    epoch: int | None = None,
    *,
    design: Design | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    accumulate: int = 1,
) -> Iterator[PaddedBatch]:
    """The batches of an epoch, for `train.step`: one compilation for any length.

    If devices and micro-batches do not divide `batch_size`, more rows are copied, and
    the mask hides them. With several processes each reads only its own rows.

    Args:
        data: Pytree of arrays `[length, ...]` on the host, or that index like them.
        sampler: Chooses the rows; with remainder `"keep"` the last batch has a shape of
            its own, and so a compilation.
        mesh: The mesh that trains.
        epoch: Which epoch, whole, without moving the sampler: for an evaluation. None
            gives the rest of the one that the sampler stands in, and moves it.
        design: The design that trains, if some devices only serve or workers own
            several.
        axis_name: The mesh axis; None takes the mesh's only axis.
        accumulate: Micro-batches per step.

    Returns:
        An iterator. It reads nothing ahead: after each batch `sampler.state()` is the
        position of the next one.

    Raises:
        ValueError: Leaves whose length is not the sampler's, a bad `accumulate`, or
            processes of which some have fewer devices that take rows.

    Example:
        >>> import jaxdp, numpy as np
        >>> sampler = jaxdp.Sampler(5, batch_size=4, shuffle=False)
        >>> data = {"x": np.arange(5) + 10}
        >>> for padded in jaxdp.epoch_batches(data, sampler, jaxdp.data_mesh(4)):
        ...     print(padded.batch["x"], padded.mask.sum())
        [10 11 12 13] 4
        [14 14 14 14] 1
    """
    _check_data(data, sampler.length)
    if accumulate < 1:
        raise ValueError(
            f"epoch_batches got accumulate={accumulate}. A step has at least 1 "
            "micro-batch. Pass what data_parallel got."
        )
    most_axes, serving = (design.most_axes, design.serving_ranks) if design else (1, 0)
    whole = auto_mesh(mesh, axis_name, "epoch_batches", most_axes)
    workers = worker_mesh(whole, serving)
    _check_shares(whole, workers)
    sharding = rows_over(workers)
    multiple = len(workers.local_devices) * accumulate
    return (
        jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, leaf),
            _padded(data, rows, -(-len(rows.mask) // multiple) * multiple),
        )
        for rows in (sampler if epoch is None else sampler.epoch(epoch))
    )


def _check_shares(whole: Mesh, workers: Mesh) -> None:
    """Refuses processes that have unequally many devices for equally many rows."""
    ranks = ranks_of(whole)
    shares = dict(zip(ranks, devices_of_ranks(workers, ranks), strict=True))
    if len(set(shares.values())) > 1:
        listed = ", ".join(f"rank {rank}: {n}" for rank, n in shares.items())
        raise ValueError(
            f"epoch_batches got processes of which some have fewer working devices "
            f"than others ({listed}), since some only serve. A sampler gives all "
            "processes equally many rows, for equally many devices. Let the servers "
            "work with dedicated=False, or split the rows yourself and give each "
            "process's own to shard_batch(..., design=...)."
        )


def _padded(data: PyTree, rows: Rows, size: int) -> PaddedBatch:
    """The rows of this process, and copies of them up to `size`."""
    indices = np.resize(rows.indices, size)
    mask = np.append(rows.mask, np.zeros(size - len(rows.mask), bool))
    return PaddedBatch(jax.tree.map(lambda leaf: leaf[indices], data), mask)


def _check_data(data: PyTree, length: int) -> None:
    """Refuses leaves that do not have one entry per row of the sampler."""
    lengths = {
        jax.tree_util.keystr(path) or "the data": (np.shape(leaf) or ("no",))[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(data)
    }
    if wrong := {name: found for name, found in lengths.items() if found != length}:
        listed = ", ".join(f"{name}: {found} rows" for name, found in wrong.items())
        raise ValueError(
            f"epoch_batches got data for a sampler of {length} rows, and leaves of "
            f"other lengths: {listed}. Every leaf must have one entry per row. Make "
            "the sampler with the number of rows of the data."
        )
