"""The designs under test, and the problem that all of them must solve alike.

A new design is one more line in `DESIGNS`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp

PyTree = Any

# From the number of devices. Buckets of 64 bytes split the leaves of `PARAMS`.
DESIGNS: dict[str, Callable[[int], jaxdp.Design]] = {
    "root-first": lambda devices: jaxdp.GatherToRoot(root=0),
    "root-last": lambda devices: jaxdp.GatherToRoot(root=devices - 1),
    "ring": lambda devices: jaxdp.RingAllReduce(),
    "ring-buckets": lambda devices: jaxdp.RingAllReduce(bucket_cap_mb=64 / 2**20),
    "doubling": lambda d: jaxdp.AllReduce("recursive_doubling", overlap=False),
    "native": lambda devices: jaxdp.NativeAllReduce(),
    "native-buckets": lambda devices: jaxdp.NativeAllReduce(bucket_cap_mb=64 / 2**20),
    "servers": lambda devices: jaxdp.ParameterServer(servers=min(2, devices)),
    "servers-worker": lambda devices: jaxdp.ParameterServer(
        servers=devices, update_on="worker"
    ),
    "zero1": lambda devices: jaxdp.Zero(1),
    "zero2": lambda devices: jaxdp.Zero(2, bucket_cap_mb=64 / 2**20),
    "zero3": lambda devices: jaxdp.Zero(3, bucket_cap_mb=64 / 2**20),
}
over_designs = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS.keys())

# One of each kind, for what options cannot change.
KINDS = {
    name: DESIGNS[name] for name in ("root-last", "ring", "native", "servers", "zero3")
}
over_kinds = pytest.mark.parametrize("design", KINDS.values(), ids=KINDS.keys())

# Those that run any optimizer, on whole trees.
WHOLE = {name: KINDS[name] for name in ("root-last", "ring", "native")} | {
    "one-server": lambda devices: jaxdp.ParameterServer(),
    "servers-worker": DESIGNS["servers-worker"],
}
over_whole = pytest.mark.parametrize("design", WHOLE.values(), ids=WHOLE.keys())

OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
}
over_optimizers = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS
)

STEPS = 10
ROWS = 24  # a multiple of 1, 2, 3 and 8


def waves(*shape: int, start: float = 0.0) -> np.ndarray:
    """Distinct numbers between -1 and 1."""
    return np.sin(start + 1.7 * np.arange(np.prod(shape))).reshape(shape).astype("f")


# 40 elements; no number of devices but 1 divides the size of every leaf.
PARAMS = {
    "hidden": {"kernel": waves(5, 3), "bias": waves(3, start=0.3), "none": None},
    "output": [waves(3, 7, start=0.7), waves(0, 4)],
    "scale": np.float32(1.1),
}
BATCHES = [
    {"x": waves(ROWS, 5, start=step), "y": waves(ROWS, 7, start=0.5 + step)}
    for step in range(STEPS)
]


def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    """Mean squared error of a small network that uses every leaf of `PARAMS`."""
    hidden = batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"][None]
    predicted = params["scale"] * jnp.tanh(hidden) @ params["output"][0]
    return jnp.mean((predicted - batch["y"]) ** 2) + jnp.sum(params["output"][1])


def on_one_device(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    batches: list[PyTree],
) -> tuple[list[PyTree], list[float]]:
    """Parameters and loss of every step of plain optax on whole batches."""

    @jax.jit
    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.tree.map(jnp.asarray, params)
    opt_state = optimizer.init(params)
    history, losses = [], []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        history.append(jax.tree.map(np.asarray, params))
        losses.append(float(loss))
    return history, losses


def one_step(
    design: Callable[[int], jaxdp.Design] | jaxdp.Design,
    loss_fn: Callable,
    params: PyTree,
    batch: PyTree,
    *,
    devices: int = 2,
    optimizer: optax.GradientTransformation | None = None,
    init: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[PyTree, dict[str, Any]]:
    """Parameters and metrics after one step; by default of `params - gradient`."""
    mesh = jaxdp.data_mesh(devices)
    design = design if isinstance(design, jaxdp.Design) else design(devices)
    train = jaxdp.data_parallel(
        loss_fn, optimizer or optax.sgd(1.0), mesh, design, **options
    )
    state, metrics = train.step(train.init(params, **(init or {})), batch)
    return train.params(state), metrics


def gradient(
    design: Callable[[int], jaxdp.Design] | jaxdp.Design,
    loss_fn: Callable,
    params: PyTree,
    batch: PyTree,
    **options: Any,
) -> PyTree:
    """The gradient that the optimizer was given in one step."""
    record = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (
            jax.tree.map(lambda g, p: g - p, updates, params),
            state,
        ),
    )
    new, _ = one_step(design, loss_fn, params, batch, optimizer=record, **options)
    return new
