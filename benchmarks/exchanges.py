"""One array, one `shard_map`, one all-reduce: ours, by hand, native, one by another."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from benchmarks import handwritten
from benchmarks.case import Case
from benchmarks.pairs import compare
from benchmarks.rows import Row

KB, MB = 2**10, 2**20
Body = Callable[[jax.Array, str], jax.Array]


class Versus(NamedTuple):
    """Two all-reduces of the same buffer.

    Attributes:
        ours: What is measured.
        theirs: What it is compared with.
        devices: N.
        size_bytes: Of the buffer on each device; a multiple of 4 N.
        limit: The ratio that must not be passed; None if nothing is promised.
    """

    ours: Body
    theirs: Body
    devices: int
    size_bytes: int
    limit: float | None = None

    def __call__(self, name: str, seconds: float) -> Iterator[Row]:
        """Checks that both sum the same, then times them in turns."""
        mesh = jaxdp.data_mesh(self.devices)
        x = buffers(mesh, self.size_bytes)
        ours, theirs = (program(body, mesh) for body in (self.ours, self.theirs))
        np.testing.assert_array_equal(ours(x), theirs(x), err_msg=name)
        yield compare(
            name,
            lambda: ours(x),
            lambda: theirs(x),
            limit=self.limit,
            seconds=seconds,
        )


def cases() -> Iterator[Case]:
    """All-reduces of 2, 4 and 8 devices."""
    for devices in (2, 4, 8):
        for megabytes in (1, 16):
            yield Case(
                name=f"ring, N = {devices}, {megabytes} MB",
                group="by hand",
                run=Versus(ring, handwritten.ring, devices, megabytes * MB, limit=1.05),
            )
    for devices, limit in ((2, 2.2), (4, 4.0)):
        yield Case(
            name=f"ring / psum, N = {devices}, 16 MB",
            group="algorithms",
            run=Versus(ring, lax.psum, devices, 16 * MB, limit),
        )
    for kilobytes in (1, 16, 64):
        yield Case(
            name=f"halving_doubling / ring, N = 8, {kilobytes} KB",
            group="algorithms",
            run=Versus(halving_doubling, ring, 8, kilobytes * KB, limit=1.0),
        )
    for size, size_bytes in (("64 KB", 64 * KB), ("16 MB", 16 * MB)):
        yield Case(
            name=f"rolled ring / unrolled, N = 8, {size}",
            group="algorithms",
            run=Versus(rolled, unrolled, 8, size_bytes),
        )


ring = jaxdp.all_reduce
halving_doubling = functools.partial(jaxdp.all_reduce, algorithm="halving_doubling")
rolled = functools.partial(jaxdp.all_reduce, unroll=False)
unrolled = functools.partial(jaxdp.all_reduce, unroll=True)


def buffers(mesh: Mesh, size_bytes: int) -> jax.Array:
    """A buffer of so many bytes on every device: small integers, exact in any order."""
    length = mesh.size * size_bytes // 4
    x = np.arange(length, dtype=np.float32) % 1021
    return jax.device_put(x, NamedSharding(mesh, P("data")))


def program(body: Body, mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """A jitted `shard_map` of `body(buffer, axis_name)`."""
    mapped = jax.shard_map(
        lambda x: body(x, "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,  # a hand-made ring is not provably replicated
    )
    return jax.jit(mapped)
