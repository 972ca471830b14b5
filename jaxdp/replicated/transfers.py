"""Arrays on their way between devices: sent, sliced, joined and summed.

The host's half of a step. Every function takes and returns arrays, starts what has to
be done and waits for nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxdp.executor import accumulation_dtype
from jaxdp.replicated import observe
from jaxdp.replicated.devices import Device
from jaxdp.replicated.inputs import is_split, value_of

Arrays = list[Any]
Sizes = tuple[int, ...]


def where(array: Any) -> Device | None:
    """The device that holds an array, the first of several; None is the host."""
    array = value_of(array)
    if not isinstance(array, jax.Array):
        return None
    return min(array.devices(), key=lambda device: device.id)


def is_on(array: Any, device: Device) -> bool:
    """Whether an array lies on this device and is to stay there."""
    array = value_of(array)
    if not isinstance(array, jax.Array) or not array.committed:
        return False
    return array.devices() == {device}


def send(
    arrays: Arrays,
    source: Device | None,
    target: Device,
    stage: str,
    what: str,
    replica: int | None = None,
) -> Arrays:
    """Copies arrays to a device; those that lie there stay what they are.

    Args:
        arrays: On `source`, or on the host if that is None.
        source: Where from; a gradient goes back there.
        target: Where to.
        stage: For observers, as `what` and `replica`.
        what: What they are.
        replica: Which replica they belong to.
    """
    if not arrays:
        return []
    began = observe.now()
    if any(isinstance(array, Tracer) for array in arrays):
        sent = jax.device_put(arrays, target, src=source)
    elif all(is_on(array, target) for array in arrays):
        sent = arrays
    else:
        sent = jax.device_put(arrays, target)
    observe.tell(stage, what, replica, source, target, arrays, {what: sent}, began)
    return sent


def cut(arrays: Arrays, source: Device | None, dim: int, sizes: Sizes) -> list[Arrays]:
    """For each slice its arrays, where the whole arrays lie.

    A key without axes becomes another key for every slice.
    """
    if source is None:
        ends = np.cumsum(sizes)[:-1]
        pieces = [np.split(array, ends, axis=dim) for array in arrays]
    else:
        pieces = [
            slices(array, dim, sizes) if is_split(array) else keys(array, len(sizes))
            for array in arrays
        ]
    return [list(part) for part in zip(*pieces, strict=True)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def slices(array: jax.Array, dim: int, sizes: Sizes) -> Arrays:
    """All slices, by one program where the array lies."""
    return jnp.split(array, np.cumsum(sizes)[:-1], axis=dim)


@functools.partial(jax.jit, static_argnums=1)
def keys(key: jax.Array, count: int) -> Arrays:
    """Another key for every replica."""
    return [jax.random.fold_in(key, i) for i in range(count)]


def join(parts: Sequence[Arrays], dim: int) -> Arrays:
    """Joins what replicas made, leaf by leaf: arrays along `dim`, scalars stacked."""

    def one(pieces):
        return jnp.concatenate(pieces, dim) if pieces[0].ndim else jnp.stack(pieces)

    return [one(pieces) for pieces in zip(*parts, strict=True)]


def unjoin(joined: Arrays, dim: int, sizes: tuple[Sizes | int, ...]) -> list[Arrays]:
    """Undoes `join`, given each leaf's sizes, or the number of scalars."""

    def one(array, size):
        if isinstance(size, int):
            return [array[i] for i in range(size)]
        return jnp.split(array, np.cumsum(size)[:-1], axis=dim)

    pieces = [one(array, size) for array, size in zip(joined, sizes, strict=True)]
    return [list(part) for part in zip(*pieces, strict=True)]


def add(parts: Sequence[Arrays]) -> Arrays:
    """Sums what replicas made, leaf by leaf, in the order of the replicas.

    16-bit leaves are summed in float32 and rounded once.
    """

    def one(pieces):
        wide = [piece.astype(accumulation_dtype(piece.dtype)) for piece in pieces]
        return functools.reduce(lax.add, wide).astype(pieces[0].dtype)

    return [one(pieces) for pieces in zip(*parts, strict=True)]


@jax.jit
def folded(key: jax.Array, replica: int) -> jax.Array:
    """A replica's own keys, of any shape."""
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, replica)


joined = jax.jit(join, static_argnums=1)
unjoined = jax.jit(unjoin, static_argnums=(1, 2))
added = jax.jit(add)
