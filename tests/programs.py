"""What the tests of program analysis share: a mesh, a batch, and a ring of devices."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

RING = [(device, (device + 1) % 8) for device in range(8)]
ROWS = np.arange(128, dtype=np.float32).reshape(8, 16)  # a row a device: 64 bytes
DATA = P("data")


def data_mesh(shape=(8,), names=("data",)):
    """A mesh of any shape over the first devices, its axes of type Auto."""
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, axis_types=auto, devices=jax.devices()[:count])
