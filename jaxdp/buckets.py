"""Which leaves travel, and which travel together: flat buckets of one dtype.

A bucket packs several leaves into one flat buffer, so that a collective pays its rounds
once for all of them. Leaves keep their dtype: nothing is promoted to pack it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def is_movable(leaf: Any) -> bool:
    """Whether a leaf holds values that can travel: numbers, bools and keys."""
    return getattr(leaf, "dtype", None) != jax.dtypes.float0


def is_summable(leaf: Any) -> bool:
    """Whether a leaf is differentiable, so that its sum is meant: float or complex."""
    if not is_movable(leaf) or is_key(leaf):
        return False
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def same_types(tree: Any, other: Any) -> bool:
    """Whether two trees of arrays agree in structure, shapes and dtypes."""
    types = [
        (jax.tree.structure(t), [(x.shape, x.dtype) for x in jax.tree.leaves(t)])
        for t in (tree, other)
    ]
    return types[0] == types[1]


def by_dtype(
    leaves: Sequence[Any], takes_part: Callable[[Any], bool]
) -> list[list[int]]:
    """Groups the indices of the leaves that take part by dtype, in order.

    Leaves without elements form groups of their own: of those nothing travels.
    """
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if takes_part(leaf):
            dtype = leaf.dtype if is_key(leaf) else jnp.result_type(leaf)
            groups.setdefault((dtype, np.size(leaf) == 0), []).append(i)
    return list(groups.values())


def assign(
    leaves: Sequence[Any],
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float | None = None,
    ready: Sequence[int] | None = None,
) -> list[list[int]]:
    """Assigns the summable leaves to buckets, in the order in which they are ready.

    A bucket holds one dtype and takes leaves until the next would pass the cap; a leaf
    larger than the cap stands alone. The first bucket of a dtype may have a smaller
    cap, so that the first transfer starts early.

    Args:
        leaves: Arrays, or anything with `shape` and `dtype`.
        bucket_cap_mb: The cap in MiB; None packs each dtype into one bucket.
        first_bucket_mb: The cap of the first bucket of each dtype, if smaller.
        ready: When each leaf is ready, as numbers that sort; None for in order.

    Returns:
        For each bucket the indices of its leaves; buckets in the order in which their
        last leaf is ready.
    """
    ready = range(len(leaves)) if ready is None else ready
    order = sorted(range(len(leaves)), key=lambda i: (ready[i], i))
    caps = [float("inf") if bucket_cap_mb is None else bucket_cap_mb * 2**20] * 2
    if first_bucket_mb is not None and bucket_cap_mb is not None:
        caps[0] = min(first_bucket_mb * 2**20, caps[1])
    buckets = []
    for group in by_dtype([leaves[i] for i in order], is_summable):
        buckets += _filled(leaves, [order[i] for i in group], *caps)
    return sorted(buckets, key=lambda bucket: max(ready[i] for i in bucket))


def _filled(
    leaves: Sequence[Any], group: list[int], first: float, cap: float
) -> list[list[int]]:
    """Buckets of the leaves of one dtype, in this order, of at most so many bytes."""
    buckets, filled = [[]], 0
    for i in group:
        nbytes = _nbytes(leaves[i])
        if buckets[-1] and filled + nbytes > (cap if buckets[1:] else first):
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += nbytes
    return buckets


def _nbytes(leaf: Any) -> int:
    """Bytes of an array, or of one of this shape and dtype."""
    return np.size(leaf) * jnp.result_type(leaf).itemsize


def scoped(
    buckets: Sequence[Sequence[int]], leaves: Sequence[Any]
) -> Iterator[tuple[AbstractContextManager, Sequence[int]]]:
    """Buckets, each with a scope that names its operations in the compiled program.

    Numbers are those of `train.buckets`, which has no buckets without elements.
    """
    number = 0
    for bucket in buckets:
        number += any(np.size(leaves[i]) for i in bucket)
        yield jax.named_scope(f"bucket_{number}"), bucket


class Bucket(NamedTuple):
    """Leaves that travel together.

    Attributes:
        names: Of the leaves, in the order in which they are packed.
        dtype: Of all of them.
        nbytes: Of all of them together.
    """

    names: tuple[str, ...]
    dtype: Any
    nbytes: int


class Buckets(tuple[Bucket, ...]):
    """All buckets of a step, in the order in which they are ready; a table as text."""

    @classmethod
    def of(
        cls, buckets: Sequence[Sequence[int]], named: Sequence[tuple[str, Any]]
    ) -> "Buckets":
        """From indices into leaves, each a pair of its name and itself.

        Leaves without elements are left out, since nothing travels.
        """
        buckets = [b for b in buckets if any(_nbytes(named[i][1]) for i in b)]
        return cls(
            Bucket(
                tuple(named[i][0] for i in indices),
                jnp.result_type(named[indices[0]][1]),
                sum(_nbytes(named[i][1]) for i in indices),
            )
            for indices in buckets
        )

    def __str__(self) -> str:
        """One line per bucket."""
        lines = [f"{'bucket':>6}  {'dtype':8}  {'bytes':>12}  leaves"]
        lines += [
            f"{i:6}  {b.dtype!s:8}  {b.nbytes:12,}  {', '.join(b.names)}"
            for i, b in enumerate(self, start=1)
        ]
        return "\n".join(lines)
