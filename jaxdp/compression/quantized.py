"""Quantizers: every number travels in fewer bits, there and back.

A ring would round its partial sums in every round, N times in all. So partial sums do
not travel: every replica sends part r of its leaf, encoded, straight to rank r. Rank r
decodes and adds the parts in the order of ranks, in float32 or wider, divides, and
encodes the mean for all. That makes two roundings, whatever N: the compressed
all-reduce of Tang et al., "1-bit Adam", ICML 2021. N = 3, what each rank sends:

    rank    its leaf, encoded                       then
    0       part 1 to 1      part 2 to 2            mean of part 0 to all
    1       part 0 to 0      part 2 to 2            mean of part 1 to all
    2       part 0 to 0      part 1 to 1            mean of part 2 to all

With error feedback a replica keeps what the first rounding took from its leaf, and of
the part that it owns also N times what the second took from the mean: nothing is lost.
"""

import abc
import dataclasses
import functools
import operator
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.compression.base import Compression, Travelled, Wire
from jaxdp.executor import accumulation_dtype
from jaxdp.packing import chunked


class Quantized(Compression):
    """Base of all quantizers: an encoding and its decoding.

    Cost: 1 round, then N - 1 of a ring; 2 (N - 1) / N of the encoded bytes sent per
    device. Leaves are padded with zeros to a multiple of N elements.

    Attributes:
        divide: Whether a mean is divided after the sum, or every contribution before.
    """

    divide: Literal["after", "before"] = "after"

    @property
    def carries_nonfinite(self):
        """Encodings do."""
        return True

    @abc.abstractmethod
    def encode(self, rows: jax.Array, key: jax.Array) -> jax.Array:
        """Encodes every row for itself.

        Args:
            rows: `[rows, length]`, float32 or wider. NaN and infinity must come out of
                `decode` as one of the two; zeros must stay zeros.
            key: For random rounding.

        Returns:
            `[rows, ...]`, of any dtype.
        """

    @abc.abstractmethod
    def decode(self, encoded: jax.Array, length: int, dtype: np.dtype) -> jax.Array:
        """Undoes it: `[rows, length]` of this dtype."""

    def mean(self, leaves, states, wire):
        """Averages on the owners; see the module docstring."""
        rows = [self._rows(leaf, wire.devices) for leaf in leaves]

        def encode(arrays, phase):
            return list(map(self.encode, arrays, wire.keys(phase)))

        def decode(arrays):
            pairs = zip(arrays, rows, strict=True)
            return [self.decode(x, like.shape[1], like.dtype) for x, like in pairs]

        own = encode(rows, 0)
        sums = map(_sum, decode(wire.to_owners(own)))
        exact = [x if self.divide == "before" else x / wire.devices for x in sums]
        exact = wire.aggregated(exact)  # of the part that this rank owns: [1, length]
        rounded = encode(exact, 1)
        everywhere = [array[:, 0] for array in wire.gather(rounded)]
        added = map(operator.sub, decode(rounded), exact)
        sent = map(functools.partial(self._sent, wire), decode(own), added)
        return Travelled(
            list(map(_whole, decode(everywhere), leaves)),
            list(map(_whole, sent, leaves)),
            states,
        )

    def _rows(self, leaf: jax.Array, devices: int) -> jax.Array:
        """What is sent of a leaf, part by part: `[N, ceil(size / N)]`."""
        rows = chunked(leaf.astype(accumulation_dtype(leaf.dtype)), devices)
        return rows / devices if self.divide == "before" else rows

    def _sent(self, wire: Wire, parts: jax.Array, added: jax.Array) -> jax.Array:
        """What the parts have contributed; `added` by the owner's rounding."""
        if self.divide == "before":
            parts = parts * wire.devices
        owned = (jnp.arange(wire.devices) == wire.rank)[:, None]
        return parts + jnp.where(owned, wire.devices * added, 0)


class _Cast(Quantized):
    """A narrower floating dtype.

    Rounding is written out: XLA may take a cast there and back for none at all, and
    error feedback would miss what it costs.
    """

    narrow: ClassVar[Any]

    def encode(self, rows, key):
        """Rounds to nearest; what is too large becomes infinity."""
        del key
        return self._rounded(rows).astype(self.narrow)

    def _rounded(self, rows: jax.Array) -> jax.Array:
        """To numbers that the narrow dtype has."""
        bits = jnp.finfo(self.narrow)
        return lax.reduce_precision(rows, bits.nexp, bits.nmant)

    def decode(self, encoded, length, dtype):
        """Widens."""
        del length
        return encoded.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Bf16(_Cast):
    """bfloat16: half the bytes, the range of float32, 8 bits of precision.

    Attributes:
        error_feedback: Off, as in PyTorch's hook: numbers lose 2**-9 of their size.
    """

    narrow = jnp.bfloat16
    error_feedback: bool = False


@dataclasses.dataclass(frozen=True)
class Fp16(_Cast):
    """float16: half the bytes, 11 bits of precision, numbers from 6e-8 to 65504.

    Attributes:
        divide: `"after"` the sum: contributions travel as they are, and the sum, in
            float32, neither overflows nor underflows. `"before"`: contributions above
            65504 fit if they / N do, but those below 2**-25 N are lost.
        error_feedback: Off, as in PyTorch's hook.

    Raises:
        ValueError: Another `divide`.
    """

    narrow = jnp.float16
    divide: Literal["after", "before"] = "after"
    error_feedback: bool = False

    def __post_init__(self):
        """Checks the options."""
        if self.divide not in ("after", "before"):
            raise ValueError(
                f"Fp16 got divide={self.divide!r}. A mean is divided 'after' the sum, "
                "or every contribution 'before' it. Use 'after', the default."
            )

    def _rounded(self, rows):
        """Keeps subnormal numbers, which `lax.reduce_precision` makes zeros."""
        bits = jnp.finfo(self.narrow)
        spacing = float(bits.smallest_subnormal)
        subnormal = jnp.round(rows / spacing) * spacing
        return jnp.where(
            jnp.abs(rows) < float(bits.tiny), subnormal, super()._rounded(rows)
        )


def _sum(parts: jax.Array) -> jax.Array:
    """Adds rows in order: `[N, length]` to `[1, length]`.

    Written out, because XLA may reorder a reduction by its size.
    """
    return functools.reduce(operator.add, jnp.split(parts, parts.shape[0]))


def _whole(parts: jax.Array, leaf: jax.Array) -> jax.Array:
    """Puts a leaf together again, without its padding."""
    return parts.reshape(-1)[: leaf.size].reshape(leaf.shape)
