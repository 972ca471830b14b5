"""The network that hosts train: layers of equal width, the same in both libraries.

Only NumPy here, because a process loads one of the two libraries.
"""

from typing import NamedTuple

import numpy as np

LEARNING_RATE = 1e-3


class Sizes(NamedTuple):
    """Of the network and of the batch of one host."""

    layers: int
    width: int
    rows: int

    @property
    def size_mb(self) -> float:
        """Φ: of the gradients, float32, in MiB."""
        return self.layers * self.width**2 * 4 / 2**20


def params(sizes: Sizes) -> list[np.ndarray]:
    """Weights `[width, width]`, layer by layer; activations keep their size."""
    random = np.random.default_rng(0)
    scale, shape = (2 / sizes.width) ** 0.5, (sizes.width, sizes.width)
    return [
        random.normal(0, scale, shape).astype(np.float32) for _ in range(sizes.layers)
    ]


def batch(sizes: Sizes, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of one host, `[rows, width]` each."""
    random = np.random.default_rng(rank + 1)
    x = random.normal(size=(sizes.rows, sizes.width)).astype(np.float32)
    return x, np.sin(x)
