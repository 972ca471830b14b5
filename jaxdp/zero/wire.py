"""How shards travel: reduce-scatter and all-gather of several leaves at once."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.collectives import all_reduce
from jaxdp.executor import accumulation_dtype
from jaxdp.packing import side_by_side
from jaxdp.primitive import Collective
from jaxdp.scheduled import scheduled
from jaxdp.zero.shards import Shard, joined, parts


@dataclasses.dataclass(frozen=True)
class Wire:
    """Over which axes shards travel, and how; for use inside `shard_map`.

    Attributes:
        axis_name: The axis that is sharded over, of N devices.
        outer: The axis with replicas of shards, or None.
        algorithm: "ring": rounds of our own; "native": `lax.psum_scatter`,
            `lax.all_gather` and `lax.psum`.
    """

    axis_name: str
    outer: str | None = None
    algorithm: Literal["ring", "native"] = "ring"

    @classmethod
    def over(cls, axes: str | tuple[str, ...], algorithm: str) -> "Wire":
        """Over the axes of a mesh: the last is sharded over."""
        if isinstance(axes, str):
            return cls(axes, None, algorithm)  # pyright: ignore[reportArgumentType]
        return cls(axes[-1], axes[0], algorithm)  # pyright: ignore[reportArgumentType]

    @property
    def devices(self) -> int:
        """N."""
        return lax.axis_size(self.axis_name)

    @property
    def rank(self) -> jax.Array:
        """Of this device, among those that are sharded over."""
        return lax.axis_index(self.axis_name)

    def reduce_scatter(self, leaves: list[jax.Array]) -> list[Shard]:
        """The mean of whole leaves over all devices, each device its part.

        Cost: N - 1 rounds, (N - 1) K / N bytes sent per device; with an outer axis of M
        devices 2 (M - 1) K / (M N) more.

        Args:
            leaves: This device's, of one dtype.
        """
        shards = self.summed(leaves, divisor=self.devices)
        if self.outer is not None:
            shards = self.everywhere(shards, (self.outer,))
        return [
            Shard(data, leaf.shape, self.devices)
            for data, leaf in zip(shards, leaves, strict=True)
        ]

    def summed(self, leaves: list[jax.Array], divisor: int = 1) -> list[jax.Array]:
        """This device's parts of sums over the sharded axis, in float32 or wider.

        Args:
            leaves: This device's, of one dtype.
            divisor: Sums are divided by it before they are rounded to that.

        Returns:
            Of each leaf `[ceil(size / N)]`.
        """
        cut = [parts(x, self.devices) for x in leaves]
        summed = functools.partial(self._summed, divisor)
        return [x.reshape(-1) for x in side_by_side(summed, cut)]

    def gather(self, shards: list[Shard]) -> list[jax.Array]:
        """Whole arrays, on every device the same.

        Cost: N - 1 rounds, (N - 1) K / N bytes sent per device.

        Args:
            shards: Of one dtype.
        """
        every = side_by_side(self._gathered, [shard.data[None] for shard in shards])
        return [
            joined(each, shard.shape, shard.layers)
            for each, shard in zip(every, shards, strict=True)
        ]

    def everywhere(
        self, leaves: list[jax.Array], axes: tuple[str, ...] | None = None
    ) -> list[jax.Array]:
        """The mean over all devices of some axes; of all, if none are given."""
        if axes is None:
            axes = (self.axis_name, *([self.outer] if self.outer else []))
        for axis_name in axes:
            leaves = all_reduce(leaves, axis_name, self.algorithm, mean=True)
        return leaves

    def _summed(self, divisor: int, rows: jax.Array) -> jax.Array:
        """`[N, length]` to this device's row of the sum, `[1, length]`, divided."""
        if self.algorithm == "ring":
            return self._scheduled("reduce_scatter", divisor)(rows)
        if not rows.size:
            return jnp.zeros((1, *rows.shape[1:]), rows.dtype)
        wide = rows.astype(accumulation_dtype(rows.dtype))
        total = lax.psum_scatter(wide, self.axis_name, tiled=True)
        return (total / divisor if divisor > 1 else total).astype(rows.dtype)

    def _gathered(self, row: jax.Array) -> jax.Array:
        """`[1, length]` to the rows of all, `[N, length]`."""
        if self.algorithm == "ring":
            return self._scheduled("all_gather", 1)(row)
        if not row.size:
            return jnp.zeros((self.devices, 0), row.dtype)
        return lax.all_gather(row, self.axis_name, tiled=True)

    def _scheduled(self, kind: str, divisor: int) -> Collective:
        """Rounds of our own."""
        return scheduled(kind, "ring", self.axis_name, self.devices, 0, divisor)
