"""TinyNet, the model of the article's minimal script."""

import jax
from flax import nnx


class TinyNet(nnx.Module):
    """Convolution, ReLU, average pool, linear: `[B, 32, 32, 3]` to `[B, 10]`."""

    def __init__(self, rngs: nnx.Rngs):
        """Makes 618 parameters: 3 x 3 x 3 x 16 + 16 and 16 x 10 + 10."""
        self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images to logits."""
        x = nnx.relu(self.conv(x))
        return self.head(x.mean((1, 2)))
