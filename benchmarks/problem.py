"""The small network that steps are compared on."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def network(rows: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Parameters of a network of three layers, inputs and targets."""
    widths = (64, 1024, 1024, 10)
    rng = np.random.default_rng(0)
    params = [
        rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)
        for shape in itertools.pairwise(widths)
    ]
    x = rng.normal(size=(rows, widths[0])).astype(np.float32)
    return params, x, np.sin(x[:, : widths[-1]])


def outputs(params: Any, x: Any) -> jax.Array:
    """The network."""
    for weight in params[:-1]:
        x = jax.nn.relu(x @ weight)
    return x @ params[-1]


def squared_error(output: jax.Array, y: Any) -> jax.Array:
    """The mean over all rows."""
    return jnp.mean((output - y) ** 2)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The mean over the rows of a batch `{"x", "y"}`."""
    return squared_error(outputs(params, batch["x"]), batch["y"])
