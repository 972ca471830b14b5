"""The largest numbers only, and where they stand.

What is left out is kept and grows until it is large: Stich, Cordonnier and Jaggi,
"Sparsified SGD with memory", NeurIPS 2018, algorithm 1, on every replica; Aji and
Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.compression.base import Compression, Travelled
from jaxdp.executor import accumulation_dtype


@dataclasses.dataclass(frozen=True)
class TopK(Compression):
    """Of every leaf the numbers of largest magnitude, from each replica its own.

    Replicas choose differently, so that they gather from all: numbers and their int32
    indices. Everybody adds them up, in the order of ranks.

    Cost: N - 1 rounds; 8 k (N - 1) bytes sent per device for a leaf of float32 of
    which k numbers travel: less than a ring as long as k / n < 1 / N.

    Attributes:
        ratio: Which share of a leaf's n numbers travels: k = ceil(ratio n).
        error_feedback: On: without it, small numbers would never travel.

    Raises:
        ValueError: `ratio` is not above 0 and at most 1.
    """

    ratio: float
    error_feedback: bool = True

    def __post_init__(self):
        """Checks the options."""
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"TopK got ratio={self.ratio}. It is the share of each leaf's numbers "
                "that travels, above 0 and at most 1. Use 0.01 for one in a hundred."
            )

    @property
    def carries_nonfinite(self):
        """What is chosen of a leaf does."""
        return True

    def mean(self, leaves, states, wire):
        """Gathers the chosen numbers and adds them up."""
        flat = [x.astype(accumulation_dtype(x.dtype)).reshape(-1) for x in leaves]
        chosen = [self._choose(numbers) for numbers in flat]
        values = wire.gather([values for values, _ in chosen])  # [N, k]
        places = wire.gather([places for _, places in chosen])
        pairs = zip(values, places, flat, strict=True)
        totals = wire.aggregated([_sum(v, p, x.size) for v, p, x in pairs])
        means = [total / wire.devices for total in totals]
        sent = [
            jnp.zeros_like(x).at[places].set(values, unique_indices=True)
            for x, (values, places) in zip(flat, chosen, strict=True)
        ]
        return Travelled(_shaped(means, leaves), _shaped(sent, leaves), states)

    def _choose(self, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The k largest and their indices; all NaN if a number is not finite."""
        k = math.ceil(self.ratio * numbers.size)
        _, places = lax.top_k(jnp.abs(numbers), k)
        finite = jnp.isfinite(numbers).all()
        return jnp.where(finite, numbers[places], jnp.nan), places


def _sum(values: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """Adds rank by rank, for the same bits everywhere: indices repeat across ranks.

    Args:
        values: `[N, k]`.
        places: `[N, k]`, each row without repetition.
        size: Of the result.
    """

    def add(total, chosen):
        values, places = chosen
        return total.at[places].add(values, unique_indices=True), None

    zeros = jnp.zeros(size, values.dtype)
    total, _ = lax.scan(add, zeros, (values, places))
    return total


def _shaped(flat: list[jax.Array], leaves: list[jax.Array]) -> list[jax.Array]:
    """Gives every array the shape of its leaf."""
    return [x.reshape(leaf.shape) for x, leaf in zip(flat, leaves, strict=True)]
