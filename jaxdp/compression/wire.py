"""What a bucket travels by: jaxdp's collectives, on arrays of any dtype."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp import marks, serving
from jaxdp.collectives import all_gather, all_reduce
from jaxdp.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class BucketWire:
    """The wire of one bucket in one step, inside `shard_map`; see `Wire`.

    Attributes:
        axis_name: The mesh axis.
        step: How many optimizer steps came before, an int32 scalar.
        root_key: Of all random numbers in this training, the same on all replicas.
        numbers: For each leaf of the bucket the number of its parameter.
        algorithm: Of the all-reduce behind `mean`.
    """

    axis_name: str
    step: jax.Array
    root_key: jax.Array
    numbers: Sequence[int]
    algorithm: str | Schedule = "ring"

    @property
    def devices(self) -> int:
        """N."""
        return lax.axis_size(self.axis_name)

    @property
    def rank(self) -> jax.Array:
        """Of this replica."""
        return lax.axis_index(self.axis_name)

    def keys(self, draw: int) -> jax.Array:
        """By step, rank and draw, then by the number of the parameter."""
        key = self.root_key
        for number in (self.step, self.rank, draw):
            key = jax.random.fold_in(key, number)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array(self.numbers))

    def only(self, indices: Sequence[int], draw: int) -> "BucketWire":
        """The wire of some of the leaves."""
        numbers = [self.numbers[i] for i in indices]
        key = jax.random.fold_in(self.root_key, draw)
        return dataclasses.replace(self, numbers=numbers, root_key=key)

    def mean(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """All-reduce; for its cost see `jaxdp.all_reduce`."""
        return all_reduce(arrays, self.axis_name, self.algorithm, mean=True)

    def to_owners(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """All to all; 1 round, (N - 1) K / N bytes sent per device."""
        devices = self.devices
        return serving.collect(arrays, self.axis_name, devices, devices, False)

    def gather(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """All-gather; N - 1 rounds, (N - 1) K bytes sent per device."""
        return all_gather(arrays, self.axis_name)

    def aggregated(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Names them; costs nothing in the compiled program."""
        return marks.aggregated(arrays, self.axis_name)
