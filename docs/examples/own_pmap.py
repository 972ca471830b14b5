"""A training loop of one's own, in `jax.pmap`: two lines make it data-parallel.

    python docs/examples/own_pmap.py  # the GPUs of this computer, or 8 CPU devices

The model is a plain tree of arrays, and the loop is plain JAX. Each device has its own
copy of parameters and optimizer state, and takes its own rows.
`jaxdp.synchronize_gradients` is the first link of the optax chain, so that clipping and
Adam see the mean gradient of all rows; `jaxdp.all_reduce` averages what is printed.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

FEATURES, HIDDEN, ROWS = 8, 64, 256


def init(seed):
    """A tree of NumPy arrays."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32) / shape[0] ** 0.5

    return {
        "first": {"w": normal(FEATURES, HIDDEN), "b": np.zeros((1, HIDDEN), "f")},
        "last": {"w": normal(HIDDEN, 1), "b": np.zeros((1, 1), "f")},
    }


def predict(params, x):
    """`[rows, FEATURES]` to `[rows, 1]`."""
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return hidden @ params["last"]["w"] + params["last"]["b"]


def loss_fn(params, batch):
    """Mean squared error of the rows of one device."""
    return jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)


def batches(steps, seed=1):
    """Rows of a function that a network must bend to follow."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        x = random.uniform(-1, 1, size=(ROWS, FEATURES)).astype(np.float32)
        yield {"x": x, "y": np.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:3]}


def main(steps=200, algorithm="ring", devices=None):
    """Trains, prints and returns what came of it."""
    devices = jax.local_devices()[:devices]
    optimizer = optax.chain(
        jaxdp.synchronize_gradients("data", algorithm),  # the first line
        optax.clip_by_global_norm(1.0),
        optax.adam(1e-2),
    )

    @functools.partial(jax.pmap, axis_name="data", devices=devices)
    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        loss = jaxdp.all_reduce(loss, "data", algorithm, mean=True)  # the second
        return optax.apply_updates(params, updates), opt_state, loss

    # pmap takes one entry per device along a leading axis.
    params = init(seed=0)
    params, opt_state = jax.tree.map(
        lambda x: np.broadcast_to(x, (len(devices), *np.shape(x))),
        (params, optimizer.init(params)),
    )
    losses = []
    for batch in batches(steps):
        rows = jax.tree.map(lambda x: x.reshape(len(devices), -1, x.shape[1]), batch)
        params, opt_state, loss = step(params, opt_state, rows)
        losses.append(loss[0])  # the same on every device
    losses = np.array(losses)
    print(f"{len(devices)} devices: loss {losses[0]:.4f}, then {losses[-1]:.4f}")
    return {"losses": losses, "params": params}


if __name__ == "__main__":
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)  # used if there are no GPUs
    main()
