"""The same programs written by hand, as one would without jaxdp."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

PyTree = Any


def ring(x: jax.Array, axis_name: str) -> jax.Array:
    """Ring all-reduce of `[L]`, N a divisor of L: the chunk under way is carried.

    The best of several spellings measured here (writing arrivals into place by
    `dynamic_update_slice` copies the buffer once more; a dynamic roll is slower at N =
    8).
    """
    devices, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    right = [(r, (r + 1) % devices) for r in range(devices)]
    chunks = x.reshape(devices, -1)

    def own(chunk):
        return lax.dynamic_index_in_dim(chunks, chunk % devices, keepdims=False)

    chunk = own(rank - 1)
    for s in range(devices - 1):
        chunk = lax.ppermute(chunk, axis_name, right) + own(rank - 2 - s)
    complete = [chunk]
    for _ in range(devices - 1):
        complete.append(lax.ppermute(complete[-1], axis_name, right))
    order = (rank - jnp.arange(devices)) % devices
    return jnp.take(jnp.stack(complete), order, axis=0, mode="clip").reshape(-1)


def step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    exchange: str,
) -> Callable:
    """A jitted step, `(params, opt_state, batch) -> (params, opt_state, loss)`.

    Args:
        loss_fn: Mean loss of the local rows.
        optimizer: The optax transformation.
        mesh: A mesh with the axis "data".
        exchange: `"psum"` or `"ring"`.
    """

    def mean(tree):
        if exchange == "psum":
            return jax.tree.map(lambda leaf: lax.psum(leaf, "data") / mesh.size, tree)
        flat, unravel = ravel_pytree(tree)
        padded = jnp.pad(flat, (0, -flat.size % mesh.size))
        return unravel(ring(padded, "data")[: flat.size] / mesh.size)

    def replica(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        loss, gradients = mean((loss, gradients))
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    body = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        check_vma=False,  # a hand-made ring is not provably replicated
    )
    return jax.jit(body, donate_argnums=(0, 1))


def port_step(
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array],
    optimizer: optax.GradientTransformation,
    devices: Sequence[Any],
) -> Callable:
    """A step of `nn.DataParallel`: one program per device, transfers between them.

    For a network of layers with ReLU between them, whose backward pass is written out:
    `jax.vjp` would hand the parameters from program to program once more.

    Args:
        loss_fn: `loss_fn(output, y)`, the mean over all rows.
        optimizer: The optax transformation.
        devices: The first holds parameters, loss and optimizer.

    Returns:
        `(params, opt_state, x, y) -> (params, opt_state, loss)`, for host arrays x, y.
    """
    root, count = devices[0], len(devices)

    @jax.jit
    def forward(params, x):
        hidden = []
        for weight in params[:-1]:
            x = jax.nn.relu(x @ weight)
            hidden.append(x)
        return x @ params[-1], hidden

    @jax.jit
    def backward(params, x, hidden, cotangent):
        inputs, gradients = [x, *hidden], []
        for weight, given in zip(reversed(params), reversed(inputs), strict=True):
            gradients.append(given.T @ cotangent)
            cotangent = jnp.where(given > 0, cotangent @ weight.T, 0)
        return gradients[::-1]

    @jax.jit
    @jax.value_and_grad
    def loss_of(outputs, y):
        return loss_fn(jnp.concatenate(outputs), y)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def update(gradients, params, opt_state):
        gradient = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *gradients)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(params, opt_state, x, y):
        y = jax.device_put(y, root)
        slices = list(map(jax.device_put, np.split(x, count), devices))
        copies = [jax.device_put(params, device) for device in devices]
        outputs, hidden = zip(*map(forward, copies, slices), strict=True)
        gathered = [jax.device_put(output, root) for output in outputs]
        loss, cotangents = loss_of(gathered, y)
        back = map(jax.device_put, cotangents, devices)
        gradients = list(map(backward, copies, slices, hidden, back))
        received = [jax.device_put(gradient, root) for gradient in gradients]
        return *update(received, params, opt_state), loss

    return step
