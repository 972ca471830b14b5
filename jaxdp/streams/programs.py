"""The programs of the two streams: segments of the gradient, and exchanges of buckets.

Values of one replica lie outside the programs as entry r of arrays `[N, ...]` that are
split over the mesh. A bucket crosses between the streams as one flat array.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.collectives import all_reduce
from jaxdp.designs.bucketed import Bucketed
from jaxdp.executor import accumulation_dtype
from jaxdp.loss import Contribution
from jaxdp.streams.meshes import Streams, moved
from jaxdp.streams.segments import Segment

REPLICATED, ROWS, REPLICA = "replicated", "rows", "replica"  # how a value lies


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the leaves of a contribution lie in flat buckets.

    Attributes:
        structure: Of the contribution.
        types: Shape and dtype of every leaf.
        buckets: For each bucket, which leaves it holds, by number.
        replicas: How many replicas contribute.
    """

    structure: Any
    types: tuple[jax.ShapeDtypeStruct, ...]
    buckets: tuple[tuple[int, ...], ...]
    replicas: int

    def packed(self, leaves: Sequence[Any], bucket: Sequence[int]) -> jax.Array:
        """The leaves of one bucket in one flat array."""
        pairs = zip(leaves, bucket, strict=True)
        flat = [jnp.asarray(x, self.types[i].dtype).reshape(-1) for x, i in pairs]
        return jnp.concatenate(flat)

    def unpacked(self, flats: Sequence[jax.Array]) -> Contribution:
        """The mean contribution; what travels in no bucket has no elements.

        Args:
            flats: Buckets as an exchange leaves them.
        """
        leaves = [jnp.zeros(t.shape, t.dtype) for t in self.types]
        for flat, bucket in zip(flats, self.buckets, strict=True):
            if not is_narrow(flat.dtype):
                flat = flat / self.replicas
            ends = np.cumsum([self.types[i].size for i in bucket])[:-1]
            for i, part in zip(bucket, jnp.split(flat, ends), strict=True):
                leaves[i] = part.reshape(self.types[i].shape)
        return self.structure.unflatten(leaves)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["flats"], meta_fields=["layout"]
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A contribution in flat buckets.

    Attributes:
        flats: An array per bucket.
        layout: What they hold. Static.
    """

    flats: tuple[Any, ...]
    layout: Layout

    def contribution(self) -> Contribution:
        """The contribution."""
        return self.layout.unpacked(self.flats)


def segment_program(
    segment: Segment,
    layout: Layout,
    buckets: Sequence[Sequence[int]],
    lies: Callable[[int], str],
    streams: Streams,
) -> Callable[..., tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]]:
    """Compiles a segment for the compute stream.

    Args:
        segment: The segment.
        layout: Of the contribution.
        buckets: Those that the segment fills, of the layout.
        lies: How a value lies on the mesh: the same everywhere, as rows of the batch,
            or as the value of each replica.
        streams: The meshes.

    Returns:
        A jitted function of the values that the segment reads. It returns its buckets,
        `[N, elements]`, and the values that it writes, `[N, ...]`.
    """
    mesh = streams.compute
    (axis_name,) = mesh.axis_names
    kinds = [lies(number) for number in segment.reads]
    specs = tuple(P() if kind == REPLICATED else P(axis_name) for kind in kinds)

    def body(*given):
        local = [
            x[0] if kind == REPLICA else x for x, kind in zip(given, kinds, strict=True)
        ]
        results, writes = segment(local)
        flats = []
        for bucket in buckets:
            flats.append(layout.packed(results[: len(bucket)], bucket))
            results = results[len(bucket) :]
        return tuple(x[None] for x in flats), tuple(x[None] for x in writes)

    program = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=specs,
        out_specs=P(axis_name),
        check_vma=False,  # see jaxdp.trainer
    )
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    made = NamedSharding(mesh, P(axis_name))
    return jax.jit(program, in_shardings=shardings, out_shardings=made)


def is_narrow(dtype: Any) -> bool:
    """Whether sums are made in a wider dtype."""
    return accumulation_dtype(dtype) != dtype


def _combined(design: Bucketed, flat: jax.Array, axis_name: str) -> jax.Array:
    """The sum of a bucket over the replicas; the mean if it is narrow.

    The division is left to the update, where XLA sees it beside what follows, as it
    does in one program. A narrow sum is rounded once, after the division, so that
    cannot wait.
    """
    if is_narrow(flat.dtype):
        (mean,) = design.averaged([flat], (0,), axis_name)
        return mean
    return all_reduce(flat, axis_name, design.algorithm)


class Exchange:
    """Sums buckets on the communication stream, one after the other.

    Each exchange takes a count from the one before. So a device runs one at a time, in
    the order in which they were dispatched, which is the same in all processes; those
    that wait occupy no thread, however many there are.
    """

    def __init__(self, design: Bucketed, streams: Streams):
        """Makes the program; it compiles once for every size of bucket."""
        self.streams = streams
        mesh = streams.communicate
        (axis_name,) = mesh.axis_names

        def body(flat, count):
            return _combined(design, flat[0], axis_name), count + 1

        split, same = P(axis_name), P()
        program = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(split, split),
            out_specs=(same, split),
            check_vma=False,  # see jaxdp.trainer
        )
        self.split = NamedSharding(mesh, split)
        out = NamedSharding(mesh, same), self.split
        platform = mesh.devices.flat[0].platform
        options = design.compiler_options(platform) or None
        self.program = jax.jit(program, out_shardings=out, compiler_options=options)
        self.start = jax.jit(
            lambda: jnp.zeros(mesh.size, jnp.int32), out_shardings=self.split
        )
        self.count = None

    def __call__(self, flat: jax.Array) -> jax.Array:
        """Dispatches one exchange, and returns before it is done.

        Args:
            flat: `[N, elements]`, split over the compute stream.

        Returns:
            `[elements]`, the same on all devices of the compute stream: the sum, or
            the mean if it is narrow.
        """
        if self.count is None:
            self.count = self.start()
        compute, communicate = self.streams
        given = moved(flat, compute, communicate, self.split.spec)
        made, self.count = self.program(given, self.count)
        return moved(made, communicate, compute, P())

    def lower(self, flat: Any) -> jax.stages.Lowered:
        """The program of one bucket; only the type of `flat` matters."""
        given = jax.ShapeDtypeStruct(flat.shape, flat.dtype, sharding=self.split)
        return self.program.lower(given, jax.eval_shape(self.start))
