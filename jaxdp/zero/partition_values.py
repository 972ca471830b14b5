"""Arrays of a program that runs on shards, each in the forms it is needed in.

    whole   the array, the same on all devices
    part    this device's part of it
    fill    a scalar that all its elements are equal to

Padding in a part is anything, NaN too: nothing may look at it but through `masked`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp import marks
from jaxdp.collectives import all_gather
from jaxdp.zero.shards import Shard, is_real, joined, local_size, own

Form = int | str  # how many layers a part has, or "whole" or "fill"


@dataclasses.dataclass(frozen=True)
class Axis:
    """The mesh axis that arrays are cut along.

    Attributes:
        name: Bound by `shard_map`.
        size: Devices on it, N.
    """

    name: str
    size: int

    def cut(self, whole: jax.Array, layers: int) -> Shard:
        """This device's part of an array."""
        return own(jnp.asarray(whole), lax.axis_index(self.name), self.size, layers)

    def gathered(self, part: Shard) -> jax.Array:
        """The whole array of all devices' parts."""
        if not part.size:
            return jnp.zeros(part.shape, part.dtype)
        return joined(all_gather(part.data, self.name), part.shape, part.layers)

    def masked(self, part: Shard, neutral: Any) -> jax.Array:
        """A part's elements, with a neutral one in place of padding."""
        real = is_real(part, lax.axis_index(self.name))
        if real is None:
            return part.data
        return jnp.where(real, part.data, jnp.asarray(neutral, part.dtype))

    def summed(self, partial: jax.Array) -> jax.Array:
        """The sum of one scalar per device."""
        return lax.psum(marks.values(partial), self.name)

    def collected(self, partial: jax.Array) -> jax.Array:
        """One scalar per device, `[N]`, by a sum in which all others add zeros.

        A maximum over devices may lose a NaN on its way; a sum does not.
        """
        if partial.dtype == jnp.bool_:
            return self.collected(partial.astype(jnp.int32)).astype(bool)
        mine = jnp.arange(self.size) == lax.axis_index(self.name)
        return self.summed(jnp.where(mine, partial, jnp.zeros_like(partial)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["whole", "part", "fill"],
    meta_fields=["axis", "shape"],
)
@dataclasses.dataclass(eq=False)
class Value:
    """An array in at least one form; others are made when asked for, and kept.

    Attributes:
        axis: What it is cut along.
        shape: Of the whole array.
        whole: The array.
        part: This device's part.
        fill: The scalar.
    """

    axis: Axis
    shape: tuple[int, ...]
    whole: Any = None
    part: Any = None
    fill: Any = None

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is here as a whole and in no other form."""
        return self.part is None and self.fill is None

    def as_whole(self) -> jax.Array:
        """The array; if it is in parts, all devices get all of them."""
        if self.whole is None:
            self.whole = (
                lax.broadcast(self.fill, self.shape)
                if self.part is None
                else self.axis.gathered(self.part)
            )
        return self.whole

    def as_part(self, layers: int = 1) -> Shard:
        """This device's part of so many layers; nothing travels unless they differ."""
        if self.part is None or self.part.layers != layers:
            self.part = self._cut(layers)
        return self.part

    def as_fill(self) -> jax.Array:
        """The scalar: of what has this form, or one element."""
        if self.fill is None:
            self.fill = jnp.reshape(self.as_whole(), ())
        return self.fill

    def only(self, form: Form) -> "Value":
        """In one form and no other."""
        if isinstance(form, int):
            return Value(self.axis, self.shape, part=self.as_part(form))
        if form == "fill":
            return Value(self.axis, self.shape, fill=self.as_fill())
        return Value(self.axis, self.shape, whole=self.as_whole())

    def reshaped(self, shape: tuple[int, ...]) -> "Value":
        """The same elements in the same order."""
        whole = None if self.whole is None else self.whole.reshape(shape)
        part = (
            None if self.part is None else dataclasses.replace(self.part, shape=shape)
        )
        return Value(self.axis, shape, whole, part, self.fill)

    def _cut(self, layers: int) -> Shard:
        """A part of the whole, or of as many fills."""
        if self.fill is None:
            return self.axis.cut(self.as_whole(), layers)
        length = local_size(self.shape, self.axis.size, layers)
        data = lax.broadcast(self.fill, (length,))
        return Shard(data, self.shape, self.axis.size, layers)


def common_layers(values: Iterable[Value]) -> int | None:
    """How values that meet are cut; None if none of them is in parts."""
    return next((v.part.layers for v in values if v.part is not None), None)


def common_form(values: Sequence[Value]) -> Form:
    """The form that values are given where one of them will be chosen."""
    if all(v.fill is not None for v in values):
        return "fill"
    layers = common_layers(values)
    return "whole" if layers is None else layers
