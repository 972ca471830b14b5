"""Batches as a training takes them: rows on workers, nothing real where devices serve.

One program runs on all devices of the mesh, so each must have an array of every batch.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxdp.data import rows_over, split_rows
from jaxdp.mesh import worker_mesh

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Batches:
    """How batches lie on a mesh.

    Attributes:
        mesh: All devices.
        serving_ranks: How many ranks of its first axis only serve.
    """

    mesh: Mesh
    serving_ranks: int

    @functools.cached_property
    def workers(self) -> Mesh:
        """The devices that have rows."""
        return worker_mesh(self.mesh, self.serving_ranks)

    @property
    def first_worker(self) -> int:
        """The first device that has rows, by its place in the mesh."""
        of_each = self.mesh.size // len(self.mesh.devices)
        return self.serving_ranks * of_each

    def given(self, batch: PyTree) -> PyTree:
        """A batch on the devices, or the shapes that it would have there."""
        leaves = jax.tree.leaves(batch)
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        return self.described(batch) if abstract else self.placed(batch)

    def placed(self, batch: PyTree) -> PyTree:
        """A batch of the workers, split over the devices."""
        batch = split_rows(batch, self.workers, self.mesh, "error", 1)
        if not self.serving_ranks:
            return batch
        return with_servers(batch, self.mesh, self.serving_ranks)

    def described(self, batch: PyTree) -> PyTree:
        """Shapes of a batch, with rows for all devices, as `placed` makes it."""
        if not self.serving_ranks:
            return batch
        workers = self.workers.size

        def extend(leaf):
            rows = leaf.shape[0] // workers * self.mesh.size
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

        return jax.tree.map(extend, batch)


def with_servers(batch: PyTree, mesh: Mesh, serving_ranks: int) -> PyTree:
    """A batch of the workers as arrays over the whole mesh; servers get nothing real.

    One program runs on all devices, so each must have an array. No row moves.

    Args:
        batch: From `shard_batch`, over `worker_mesh(mesh, serving_ranks)`.
        mesh: The whole mesh.
        serving_ranks: How many ranks of its first axis only serve.
    """
    sharding = rows_over(mesh)
    servers, local = {*mesh.devices[:serving_ranks].flat}, mesh.local_devices
    workers = mesh.size - len(servers)

    def extend(leaf):
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        shape = (leaf.shape[0] // workers, *leaf.shape[1:])
        return jax.make_array_from_single_device_arrays(
            (shape[0] * mesh.size, *shape[1:]),
            sharding,
            [
                _blank(shape, leaf.dtype, d) if d in servers else shards[d]
                for d in local
            ],
            dtype=leaf.dtype,
        )

    return jax.tree.map(extend, batch)


@functools.lru_cache(maxsize=64)
def _blank(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
    """Zeros that nobody reads."""
    return jax.device_put(jnp.zeros(shape, dtype), device)
