"""A small convolutional network for scikit-learn's digits."""

import jax
from flax import nnx


class DigitsNet(nnx.Module):
    """Two 3x3 convolutions, then two linear layers: `[B, 8, 8, 1]` to `[B, 10]`."""

    def __init__(self, rngs: nnx.Rngs):
        """Makes 38,282 parameters."""
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.hidden = nnx.Linear(512, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images to logits."""
        x = nnx.relu(self.conv1(x))
        x = nnx.relu(self.conv2(x))  # [B, 4, 4, 32]
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.head(x)
