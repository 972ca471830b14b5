"""Integers of eight bits, with a scale for every block of numbers.

A block `x` travels as `round(x / scale)`, from -127 to 127, where `scale` is its
largest magnitude / 127. So a block with an outlier costs only its own numbers their
precision: an error of at most `scale / 2`. Rounding up or down at random, in proportion
to the distance, makes the error twice as large but zero on average (Alistarh et al.,
"QSGD", NIPS 2017, section 3.1).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.compression.quantized import Quantized

LARGEST = 127  # as many numbers above zero as below


@dataclasses.dataclass(frozen=True)
class Int8(Quantized):
    """8-bit integers: a quarter of the bytes of float32, and the scales.

    Cost: as every quantizer; n + 4 ceil(n / block) bytes encode a part of n numbers of
    a leaf (8 bytes per scale if the leaf is float64).

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
                "must be at least 1. Use 256, the default: scales add 4 / 256 = 1.6 %."
            )

    def encode(self, rows, key):
        """Per row the integers, then the bytes of the scales."""
        blocks = self._blocks(rows)
        scales = jnp.abs(blocks).max(-1) / LARGEST
        # Where magnitudes are too small to divide by, numbers count as zeros.
        scales = jnp.where(scales < jnp.finfo(scales.dtype).tiny, 0, scales)
        quotients = blocks / jnp.where(scales == 0, jnp.inf, scales)[..., None]
        if self.stochastic:
            integers = jnp.floor(quotients + _dice(key, quotients))
        else:
            integers = jnp.round(quotients)
        integers = jnp.clip(integers, -LARGEST, LARGEST).astype(jnp.int8)
        integers = integers.reshape(len(rows), -1)[:, : rows.shape[1]]
        bits = lax.bitcast_convert_type(scales, jnp.int8).reshape(len(rows), -1)
        return jnp.concatenate([integers, bits], axis=1)

    def decode(self, encoded, length, dtype):
        """Integers times their scales; a scale of NaN or infinity makes them such."""
        blocks = self._blocks(encoded[:, :length].astype(dtype))
        bits = encoded[:, length:].reshape(*blocks.shape[:2], dtype.itemsize)
        scales = lax.bitcast_convert_type(bits, dtype)
        return (blocks * scales[..., None]).reshape(len(encoded), -1)[:, :length]

    def _blocks(self, rows: jax.Array) -> jax.Array:
        """`[rows, length]` as `[rows, blocks, block]`, padded with zeros."""
        length = rows.shape[1]
        block = min(self.block, max(length, 1))
        padded = jnp.pad(rows, ((0, 0), (0, -length % block)))
        return padded.reshape(len(rows), padded.shape[1] // block, block)


def _dice(key: jax.Array, like: jax.Array) -> jax.Array:
    """Uniform in [0, 1).

    By XLA's own generator: Threefry would take a second per leaf to compile.
    """
    data = jnp.tile(jax.random.key_data(key), 2)  # four words instead of two
    fast = jax.random.wrap_key_data(data, impl="rbg")
    return jax.random.uniform(fast, like.shape, like.dtype)
