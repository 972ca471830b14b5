"""ResNet-50 (He et al., CVPR 2016, table 1), with the stride in the 3x3 convolution."""

from collections.abc import Sequence
from functools import partial

import jax
from flax import nnx

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # channels inside, blocks
EXPANSION = 4  # channels of a block's result over those inside it
Conv = partial(nnx.Conv, use_bias=False)
# E[x²] - E[x]², which is Flax's default, cancels for means far from zero.
Norm = partial(nnx.BatchNorm, use_fast_variance=False)


class Block(nnx.Module):
    """Bottleneck: 1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, inside: int, stride: int, rngs: nnx.Rngs):
        """Makes the layers; the shortcut projects where the shape changes."""
        out = EXPANSION * inside
        self.conv1 = Conv(channels, inside, (1, 1), rngs=rngs)
        self.norm1 = Norm(inside, rngs=rngs)
        self.conv2 = Conv(inside, inside, (3, 3), strides=stride, rngs=rngs)
        self.norm2 = Norm(inside, rngs=rngs)
        self.conv3 = Conv(inside, out, (1, 1), rngs=rngs)
        self.norm3 = Norm(out, rngs=rngs)
        self.projects = channels != out
        if self.projects:
            self.project = Conv(channels, out, (1, 1), strides=stride, rngs=rngs)
            self.norm = Norm(out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, H, W, channels]` to `[B, H / stride, W / stride, 4 inside]`."""
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (self.norm(self.project(x)) if self.projects else x))


class ResNet50(nnx.Module):
    """`[B, 224, 224, 3]` to `[B, classes]`."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        classes: int = 1000,
        stages: Sequence[tuple[int, int]] = STAGES,
    ):
        """Makes 25,557,032 parameters, or fewer with other stages."""
        channels = stages[0][0]
        self.stem = Conv(3, channels, (7, 7), strides=2, rngs=rngs)
        self.norm = Norm(channels, rngs=rngs)
        blocks = []
        for stage, (inside, count) in enumerate(stages):
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(Block(channels, inside, stride, rngs))
                channels = EXPANSION * inside
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images to logits."""
        x = nnx.relu(self.norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))
