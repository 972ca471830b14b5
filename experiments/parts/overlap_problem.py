"""The step whose communication is to be hidden: an MLP on a parameter server.

Layers of equal width, in bfloat16, SGD. Under `max_staleness=1` a step pushes, applies
and pulls the gradients of the step before, and computes its own beside that.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxdp
from jaxdp.targets import Hardware
from jaxdp.training import DataParallel

STALENESS = (0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the network, and of the batch of one device."""

    layers: int
    width: int
    rows: int

    @property
    def gradient_bytes(self) -> int:
        """Φ: bytes of the parameters, and of the gradients."""
        return 2 * self.layers * self.width**2

    @property
    def step_flops(self) -> int:
        """Of the matrix multiplications on one device: two a layer go backward.

        The first layer's needs no gradient of its input.
        """
        return (3 * self.layers - 1) * 2 * self.rows * self.width**2


class Bounds(NamedTuple):
    """Step times in seconds: one after the other, and side by side."""

    synchronous_s: float
    overlapped_s: float


def bounds(
    compute_s: float, size_bytes: int, devices: int, hardware: Hardware
) -> Bounds:
    """The step times that dependences allow.

    Args:
        compute_s: What kernels take.
        size_bytes: Φ, which the server receives from and sends to each of the others.
        devices: N.
        hardware: Whose link carries it.
    """
    communication_s = 2 * (devices - 1) * hardware.link.transfer_s(size_bytes)
    return Bounds(compute_s + communication_s, max(compute_s, communication_s))


def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean squared error of an MLP without biases."""
    hidden = batch["x"]
    for weights in params.values():
        hidden = jax.nn.relu(hidden @ weights)
    return jnp.mean((hidden - batch["y"]).astype(jnp.float32) ** 2)


def training(mesh: jax.sharding.Mesh, max_staleness: int) -> DataParallel:
    """The training program, synchronous or one step late."""
    design = jaxdp.ParameterServer(max_staleness=max_staleness, policy="sliding")
    return jaxdp.data_parallel(loss_fn, optax.sgd(0.01), mesh, design=design)


def lowered(
    mesh: jax.sharding.Mesh, max_staleness: int, sizes: Sizes
) -> jax.stages.Lowered:
    """The step without any data, for devices that need not exist."""
    train = training(mesh, max_staleness)
    params, batch = _shapes(sizes, mesh.size)
    return train.lower(jax.eval_shape(train.init, params), batch)


def call(
    program: jax.stages.Compiled,
    mesh: jax.sharding.Mesh,
    max_staleness: int,
    sizes: Sizes,
) -> Callable[[], Any]:
    """The compiled step with data, to be timed."""
    train = training(mesh, max_staleness)
    params, batch = jax.tree.map(_random, _shapes(sizes, mesh.size))
    batch = jaxdp.shard_batch(batch, mesh)
    state = train.init(params)

    def step():
        nonlocal state
        state, metrics = program(state, batch)
        return state, metrics

    return step


def _shapes(sizes: Sizes, devices: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and a batch for all devices, as shapes."""
    weights = jax.ShapeDtypeStruct((sizes.width, sizes.width), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((devices * sizes.rows, sizes.width), jnp.bfloat16)
    params = {f"layer {i}": weights for i in range(sizes.layers)}
    return params, {"x": rows, "y": rows}


def _random(shape: jax.ShapeDtypeStruct) -> jax.Array:
    scale = shape.shape[-1] ** -0.5  # activations keep their size
    return scale * jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)
