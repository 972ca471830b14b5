"""Shards: arrays that are flattened, padded and cut into one part per device.

An array of `size` elements on N devices becomes N parts of ceil(size / N) elements,
part r on rank r; the last ones are padded with zeros, N ceil(size / N) - size in all.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.packing import unpadded

PyTree = Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["shape"]
)
@dataclasses.dataclass(frozen=True)
class Shard:
    """An array in parts.

    Attributes:
        data: Globally `[N * length]`, split over the devices; inside `shard_map` this
            device's `[length]`.
        shape: Of the whole array. Static.
    """

    data: Any
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the whole array, without padding."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return jnp.result_type(self.data)


def is_shard(leaf: Any) -> bool:
    """Whether this is a `Shard`: for `is_leaf`."""
    return isinstance(leaf, Shard)


def length(size: int, devices: int) -> int:
    """Elements of one part, ceil(size / N)."""
    return -(-size // devices)


def cut(array: Any, devices: int) -> Shard:
    """Cuts a whole array, globally; NumPy arrays stay such."""
    missing = -np.size(array) % devices
    return Shard(_module(array).pad(array.reshape(-1), (0, missing)), array.shape)


def whole(shard: Shard) -> Any:
    """The array of global parts; NumPy arrays stay such."""
    return unpadded(shard.data, jax.ShapeDtypeStruct(shard.shape, shard.dtype))


def _module(array: Any) -> Any:
    """NumPy or its counterpart in JAX."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp
