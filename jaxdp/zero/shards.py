"""Shards: arrays that are flattened, padded and cut into one part per device.

An array of `size` elements on N devices becomes N parts of ceil(size / N) elements,
part r on rank r; the last ones are padded with zeros, N ceil(size / N) - size in all.
An array of stacked layers may be cut layer by layer instead: then part r holds part r
of every layer, so that one layer can be gathered alone.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.trees import module_of

PyTree = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data"],
    meta_fields=["shape", "devices", "layers"],
)
@dataclasses.dataclass(frozen=True)
class Shard:
    """An array in parts.

    Attributes:
        data: Globally `[N * layers * length]`, split over the devices; inside
            `shard_map` this device's `[layers * length]`.
        shape: Of the whole array. Static.
        devices: N. Static.
        layers: How many pieces are cut by themselves: 1, or the first dimension.
            Static.
    """

    data: Any
    shape: tuple[int, ...]
    devices: int
    layers: int = 1

    @property
    def size(self) -> int:
        """Elements of the whole array, without padding."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return jnp.result_type(self.data)

    def like(self, data: Any) -> "Shard":
        """Other numbers in the same parts."""
        return dataclasses.replace(self, data=data)


def is_shard(leaf: Any) -> bool:
    """Whether this is a `Shard`: for `is_leaf`."""
    return isinstance(leaf, Shard)


def local_size(shape: tuple[int, ...], devices: int, layers: int = 1) -> int:
    """Elements of one part, padding included: ceil(size / N), for each layer."""
    return layers * -(-math.prod(shape) // layers // devices) if layers else 0


def parts(array: Any, devices: int, layers: int = 1) -> Any:
    """`[N, layers * length]`: all parts of a whole array. NumPy arrays stay such."""
    rows = array.reshape(layers, np.size(array) // max(layers, 1))
    rows = module_of(array).pad(rows, ((0, 0), (0, -rows.shape[1] % devices)))
    if layers == 1:
        return rows.reshape(devices, rows.size // devices)
    rows = rows.reshape(layers, devices, rows.shape[1] // devices)
    return rows.swapaxes(0, 1).reshape(devices, rows.size // devices)


def joined(parts: Any, shape: tuple[int, ...], layers: int = 1) -> Any:
    """The whole array of all its parts, `[N, layers * length]`; undoes `parts`."""
    devices, size = len(parts), math.prod(shape)
    if layers > 1:
        parts = parts.reshape(devices, layers, parts.shape[1] // layers)
        parts = parts.swapaxes(0, 1)
    rows = parts.reshape(layers, parts.size // max(layers, 1))
    return rows[:, : size // max(layers, 1)].reshape(shape)


def cut(array: Any, devices: int, layers: int = 1) -> Shard:
    """A whole array in parts, globally. NumPy arrays stay such."""
    data = parts(array, devices, layers).reshape(-1)
    return Shard(data, np.shape(array), devices, layers)


def whole(shard: Shard) -> Any:
    """The array of global parts. NumPy arrays stay such, and are views if they can."""
    data = shard.data.reshape(shard.devices, shard.data.size // shard.devices)
    return joined(data, shard.shape, shard.layers)


def own(array: jax.Array, rank: jax.Array, devices: int, layers: int = 1) -> Shard:
    """One device's part of an array that it holds whole."""
    data = parts(jnp.asarray(array), devices, layers)[rank]
    return Shard(data, array.shape, devices, layers)


def is_real(shard: Shard, rank: jax.Array) -> jax.Array | None:
    """Which elements of a device's part are no padding; None if all are, everywhere.

    Args:
        shard: This device's part.
        rank: Of the device.

    Returns:
        `[layers * length]`, bool.
    """
    length = shard.data.size // max(shard.layers, 1)
    size = shard.size // max(shard.layers, 1)
    if length * shard.devices == size:
        return None
    first = rank * length + jnp.arange(length)
    return jnp.tile(first < size, shard.layers)
