"""Integers of eight bits, with a scale for every block of numbers.

A block `x` travels as `round(x / scale)`, from -127 to 127, where `scale` is its
largest magnitude / 127, rounded up to bfloat16. So a block with an outlier costs only
its own numbers their precision: an error of at most `scale / 2`. Rounding up or down at
random, in proportion to the distance, makes the error twice as large but zero on
average (Alistarh et al., "QSGD", NIPS 2017, section 3.1).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.compression.quantized import Quantized
from jaxdp.packing import apart

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

    def encode(self, leaves, keys):
        """Per row the integers of all leaves, then the bytes of their scales."""
        every = [self._blocks(leaf) for leaf in leaves]
        dice = self._dice(every, keys) if self.stochastic else [None] * len(leaves)
        scales = [_scales(blocks) for blocks in every]
        rounded = map(_integers, every, scales, dice)
        integers = [
            blocks.reshape(len(leaf), -1)[:, : leaf.shape[1]]
            for leaf, blocks in zip(leaves, rounded, strict=True)
        ]
        narrow = jnp.concatenate(scales, axis=1).astype(jnp.bfloat16)
        bits = lax.bitcast_convert_type(narrow, jnp.int8).reshape(len(narrow), -1)
        return jnp.concatenate([*integers, bits], axis=1)

    def decode(self, encoded, lengths, dtype):
        """Integers times their scales; a scale of NaN or infinity makes them such."""
        integers = apart(encoded[:, : sum(lengths)], lengths)
        every = [self._blocks(leaf.astype(dtype)) for leaf in integers]
        bits = encoded[:, sum(lengths) :].reshape(len(encoded), -1, 2)
        scales = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)
        scales = apart(scales, [blocks.shape[1] for blocks in every])
        return [
            (blocks * scale[..., None]).reshape(len(encoded), -1)[:, :length]
            for blocks, scale, length in zip(every, scales, lengths, strict=True)
        ]

    def _blocks(self, leaf: jax.Array) -> jax.Array:
        """`[rows, length]` as `[rows, blocks, block]`, padded with zeros."""
        length = leaf.shape[1]
        block = min(self.block, max(length, 1))
        padded = jnp.pad(leaf, ((0, 0), (0, -length % block)))
        return padded.reshape(len(leaf), padded.shape[1] // block, block)

    def _dice(self, every: list[jax.Array], keys: jax.Array) -> list[jax.Array]:
        """Uniform in [0, 1), by leaf and block.

        All in one call: XLA would take a second to compile the draw of each leaf.
        """
        counts = [blocks.shape[1] for blocks in every]
        leaf = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        shape = len(every[0]), self.block

        def draw(key, number):
            key = jax.random.fold_in(key, number)
            return jax.random.uniform(key, shape, every[0].dtype)

        drawn = jax.vmap(draw, out_axes=1)(keys[leaf], number)
        return [
            part[..., : blocks.shape[-1]]
            for part, blocks in zip(apart(drawn, counts), every, strict=True)
        ]


def _scales(blocks: jax.Array) -> jax.Array:
    """Rounded up to bfloat16: integers times scales are exact in float32."""
    bits = jnp.finfo(jnp.bfloat16)
    upwards = (1 + float(bits.eps) / 2) / LARGEST
    scales = jnp.abs(blocks).max(-1) * upwards
    scales = lax.reduce_precision(scales, bits.nexp, bits.nmant)
    # Where magnitudes are too small to divide by, numbers count as zeros.
    return jnp.where(scales < float(bits.tiny), 0, scales)


def _integers(
    blocks: jax.Array, scales: jax.Array, dice: jax.Array | None
) -> jax.Array:
    """Rounds to nearest, or up where the dice say so."""
    quotients = blocks / jnp.where(scales == 0, jnp.inf, scales)[..., None]
    rounded = jnp.round(quotients) if dice is None else jnp.floor(quotients + dice)
    return jnp.clip(rounded, -LARGEST, LARGEST).astype(jnp.int8)
