"""Push and pull: what travels between workers and servers, as trees.

`S` servers own a part each: every leaf is flattened, padded with zeros and cut into S
equal parts, and server s owns part s of every leaf. Parts keep the number of
dimensions of their leaf, `(1, ..., 1, length)`, so that a mask by `ndim` still holds.

`push`, `collect` and `pull` run inside `shard_map`. Floats are `[S, ...]` before a push
and after a pull; leaves that are no floats stay as they are. A `collect` adds nothing,
and so it moves leaves of any dtype.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import algorithms
from jaxdp.buckets import is_movable, is_summable
from jaxdp.packing import per_dtype, side_by_side, unpadded
from jaxdp.primitive import Collective
from jaxdp.schedule import Schedule, verify

PyTree = Any


def part_shape(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The shape of one of `parts` equal parts of a leaf."""
    if parts == 1:
        return shape
    length = math.ceil(math.prod(shape) / parts)
    return (1,) * (len(shape) - 1) + (length,) if shape else ()


def owned_parts(devices: int, inner: int, servers: int) -> np.ndarray:
    """`[devices]`: the part that each device keeps; workers keep the last server's.

    Args:
        devices: All of the mesh.
        inner: Devices of a worker or server, neighbours in the mesh.
        servers: S.
    """
    ranks = np.arange(devices)
    return ranks % inner * servers + np.minimum(ranks // inner, servers - 1)


def split(tree: PyTree, parts: int) -> PyTree:
    """Cuts every leaf: `[...]` becomes `[parts, *part_shape]`."""

    def cut(leaf):
        leaf = jnp.asarray(leaf)
        shape = part_shape(leaf.shape, parts)
        missing = parts * math.prod(shape) - leaf.size
        return jnp.pad(leaf.reshape(-1), (0, missing)).reshape(parts, *shape)

    return jax.tree.map(cut, tree)


def joined(parts: PyTree, like: PyTree) -> PyTree:
    """Undoes `split`; `like` has the shapes."""
    return jax.tree.map(unpadded, parts, like)


def push(
    tree: PyTree, axis_name: str, devices: int, servers: int, dedicated: bool
) -> PyTree:
    """Averages entry s of every leaf over the workers, on server s.

    Cost: 1 round; each server receives K / S bytes from every worker but itself.

    Args:
        tree: Leaves `[S, ...]`.
        axis_name: The mesh axis, of `devices` devices.
        devices: N.
        servers: S, the first ranks.
        dedicated: Whether servers do not work.

    Returns:
        Leaves `[...]`: zeros on devices that do not serve. Rounded once, after the
        division.
    """
    schedule = algorithms.sharded_servers_push(devices, servers, dedicated)
    workers = len(schedule.starts[0])
    return _run("push", schedule, axis_name, tree, workers)


def collect(
    tree: PyTree, axis_name: str, devices: int, servers: int, dedicated: bool
) -> PyTree:
    """Gives server s entry s of every leaf of all workers, apart.

    Cost: as `push`; but each server keeps K / S bytes per worker.

    Returns:
        Leaves `[W, ...]`, one entry per worker: zeros on devices that do not serve.
    """
    schedule = algorithms.sharded_servers_collect(devices, servers, dedicated)
    return _run("collect", schedule, axis_name, tree)


def pull(tree: PyTree, axis_name: str, devices: int, servers: int) -> PyTree:
    """Gives every device the parts of all servers.

    Cost: 1 round; each server sends (N - 1) K / S bytes.

    Args:
        tree: Leaves `[...]`, the part of each server.
        axis_name: The mesh axis, of `devices` devices.
        devices: N.
        servers: S, the first ranks.

    Returns:
        Leaves `[S, ...]`, the same on all devices.
    """
    schedule = algorithms.sharded_servers_pull(devices, servers)
    parts = jax.tree.map(lambda leaf: leaf[None] if is_summable(leaf) else leaf, tree)
    return _run("pull", schedule, axis_name, parts)


def _run(
    kind: str, schedule: Schedule, axis_name: str, tree: PyTree, divisor: int = 1
) -> PyTree:
    """Moves the rows of all leaves of a dtype together."""
    collective = Collective(kind, verify(schedule), axis_name, divisor=divisor)

    takes_part = is_movable if kind == "collect" else is_summable

    def move(leaves):
        rows = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
        return [
            moved.reshape(*_leading(kind, moved), *leaf.shape[1:])
            for moved, leaf in zip(side_by_side(collective, rows), leaves, strict=True)
        ]

    return per_dtype(tree, takes_part, move)


def _leading(kind: str, moved: jax.Array) -> tuple[int, ...]:
    """A push leaves one part, without an axis for it."""
    return () if kind == "push" else (moved.shape[0],)
