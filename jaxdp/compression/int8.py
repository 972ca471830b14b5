"""Integers of eight bits, with a scale for every block of numbers.

A block `x` travels as `round(x / scale)`, from -127 to 127, where `scale` is its
largest magnitude / 127, rounded up to bfloat16. So a block with an outlier costs only
its own numbers their precision: an error of at most `scale / 2`. Rounding up or down at
random, in proportion to the distance, makes the error twice as large but zero on
average (Alistarh et al., "QSGD", NIPS 2017, section 3.1).
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.compression.quantized import Quantized

LARGEST = 127  # as many numbers above zero as below


@dataclasses.dataclass(frozen=True)
class Int8(Quantized):
    """8-bit integers: a quarter of the bytes of float32, and the scales.

    Cost: as every quantizer; n + 2 ceil(n / block) bytes encode n numbers, which are
    the Nth part of a leaf. Magnitudes are those of float32, in float64 too.

    Attributes:
        block: How many neighbours in a leaf share a scale; at least 1.
        stochastic: Rounds at random, without bias, by keys that differ between steps,
            replicas and parameters.
        error_feedback: On: rounding to nearest is biased.

    Raises:
        ValueError: `block` is below 1.
    """

    block: int = 256
    stochastic: bool = False
    error_feedback: bool = True

    def __post_init__(self):
        """Checks the options."""
        if self.block < 1:
            raise ValueError(
                f"Int8 got block={self.block}. So many numbers share a scale, so it "
                "must be at least 1. Use 256, the default: scales add 2 / 256 = 0.8 %."
            )

    def encode(self, rows, lengths, keys):
        """Per row the integers of all leaves, then the bytes of their scales."""
        blocks = self._blocks(rows, lengths)
        scales = self._scales(blocks)
        quotients = blocks / jnp.where(scales == 0, jnp.inf, scales)[..., None]
        if self.stochastic:
            integers = jnp.floor(quotients + self._dice(quotients, lengths, keys))
        else:
            integers = jnp.round(quotients)
        integers = jnp.clip(integers, -LARGEST, LARGEST).astype(jnp.int8)
        bits = lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.int8)
        bits = bits.reshape(len(rows), -1)
        return jnp.concatenate([self._rows(integers, lengths), bits], axis=1)

    def decode(self, encoded, lengths, dtype):
        """Integers times their scales; a scale of NaN or infinity makes them such."""
        integers = encoded[:, : sum(lengths)].astype(dtype)
        blocks = self._blocks(integers, lengths)
        bits = encoded[:, sum(lengths) :].reshape(*blocks.shape[:2], 2)
        scales = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)
        return self._rows(blocks * scales[..., None], lengths)

    def _scales(self, blocks: jax.Array) -> jax.Array:
        """Rounded up to bfloat16: integers times scales are exact in float32."""
        bits = jnp.finfo(jnp.bfloat16)
        upwards = (1 + float(bits.eps) / 2) / LARGEST
        scales = jnp.abs(blocks).max(-1) * upwards
        scales = lax.reduce_precision(scales, bits.nexp, bits.nmant)
        # Where magnitudes are too small to divide by, numbers count as zeros.
        return jnp.where(scales < float(bits.tiny), 0, scales)

    def _counts(self, lengths: Sequence[int]) -> list[int]:
        """How many blocks each leaf has."""
        return [math.ceil(length / self.block) for length in lengths]

    def _blocks(self, rows: jax.Array, lengths: Sequence[int]) -> jax.Array:
        """`[rows, sum(lengths)]` as `[rows, blocks, block]`, leaves padded to whole."""
        leaves = jnp.split(rows, np.cumsum(lengths)[:-1], axis=1)
        padding = [-length % self.block for length in lengths]
        padded = [
            jnp.pad(leaf, ((0, 0), (0, missing)))
            for leaf, missing in zip(leaves, padding, strict=True)
        ]
        shape = len(rows), sum(self._counts(lengths)), self.block
        return jnp.concatenate(padded, axis=1).reshape(shape)

    def _rows(self, blocks: jax.Array, lengths: Sequence[int]) -> jax.Array:
        """Undoes `_blocks`."""
        flat = blocks.reshape(len(blocks), -1)
        starts = self.block * np.cumsum([0, *self._counts(lengths)])
        pairs = zip(starts, lengths, strict=False)
        cut = [flat[:, start : start + length] for start, length in pairs]
        return jnp.concatenate(cut, axis=1)

    def _dice(
        self, blocks: jax.Array, lengths: Sequence[int], keys: jax.Array
    ) -> jax.Array:
        """Uniform in [0, 1), by leaf and block.

        All in one call: XLA would take a second to compile the draw of each leaf.
        """
        counts = self._counts(lengths)
        leaf = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])

        def draw(key, number):
            key = jax.random.fold_in(key, number)
            return jax.random.uniform(key, blocks[:, 0].shape, blocks.dtype)

        return jax.vmap(draw, out_axes=1)(keys[leaf], number)
