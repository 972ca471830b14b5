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
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.compression.base import Compression, Travelled
from jaxdp.executor import accumulation_dtype
from jaxdp.packing import apart, chunked, unpadded


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
    def encode(self, leaves: list[jax.Array], keys: jax.Array) -> jax.Array:
        """Encodes every row of every leaf for itself.

        Args:
            leaves: `[rows, length]`, each of its own length, float32 or wider. NaN and
                infinity must come out of `decode` as one of the two; zeros must stay.
            keys: One for each leaf, for random rounding.

        Returns:
            `[rows, ...]`, of any dtype: row r is what travels to rank r.
        """

    @abc.abstractmethod
    def decode(
        self, encoded: jax.Array, lengths: Sequence[int], dtype: np.dtype
    ) -> list[jax.Array]:
        """Undoes it: for each leaf `[rows, length]` of this dtype."""

    def mean(self, leaves, states, wire):
        """Averages on the owners; see the module docstring.

        Products are of few bits, so exact: it makes no difference in which programs
        XLA takes one together with a sum. Leaves stay apart but on the wire: XLA would
        compile what packs all of them into every operation that reads one.
        """
        devices = wire.devices
        shrink = devices if self.divide == "before" else 1
        dtype = accumulation_dtype(leaves[0].dtype)
        rows = [chunked(leaf.astype(dtype) / shrink, devices) for leaf in leaves]
        lengths = [part.shape[1] for part in rows]

        def decoded(encoded, factor=1):
            return [factor * x for x in self.decode(encoded, lengths, dtype)]

        own = self.encode(rows, wire.keys(0))
        (arrived,) = wire.to_owners([own])
        totals = wire.aggregated([_sum(parts) for parts in decoded(arrived, shrink)])
        rounded = self.encode([x / devices for x in totals], wire.keys(1))  # [1, ...]
        (everywhere,) = wire.gather([rounded])
        owned = (jnp.arange(devices) == wire.rank)[:, None]
        sent = [
            parts + jnp.where(owned, ends - total, 0)
            for parts, ends, total in zip(
                decoded(own, shrink), decoded(rounded, devices), totals, strict=True
            )
        ]
        means = decoded(everywhere[:, 0])
        return Travelled(
            list(map(unpadded, means, leaves)),
            list(map(unpadded, sent, leaves)),
            states,
        )


class _Cast(Quantized):
    """A narrower floating dtype.

    Rounding is written out: XLA may take a cast there and back for none at all, and
    error feedback would miss what it costs.
    """

    narrow: ClassVar[Any]

    def encode(self, leaves, keys):
        """Rounds to nearest; what is too large becomes infinity."""
        del keys
        rounded = [self._rounded(leaf).astype(self.narrow) for leaf in leaves]
        return jnp.concatenate(rounded, axis=1)

    def _rounded(self, rows: jax.Array) -> jax.Array:
        """To numbers that the narrow dtype has."""
        bits = jnp.finfo(self.narrow)
        return lax.reduce_precision(rows, bits.nexp, bits.nmant)

    def decode(self, encoded, lengths, dtype):
        """Widens."""
        return [leaf.astype(dtype) for leaf in apart(encoded, lengths)]


@dataclasses.dataclass(frozen=True)
class Bf16(_Cast):
    """bfloat16: half the bytes, the range of float32, 8 bits of precision.

    Attributes:
        error_feedback: Off, as in PyTorch's hook: numbers lose up to
            2**-8 of their size.
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
