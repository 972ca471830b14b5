"""Flax Linen: a small ResNet, and two ways for BatchNorm to see a batch that is split.

    python docs/examples/linen_resnet.py                       # GPUs, or 8 CPU devices
    python -m jaxdp.launch -n 2 docs/examples/linen_resnet.py  # two processes

`"synchronized"`: BatchNorm gets `axis_name="data"` and averages over all replicas, so
that training computes what one device would. All replicas then keep the same running
statistics, which `data_parallel` proves on the program.

`"local"`: each replica normalises by its own rows, as `DistributedDataParallel` does.
Their running statistics differ, and `model_state="mean"` averages them in every step.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxdp

TEST_ROWS = 360  # of 1797
NORMS = {  # axis_name of BatchNorm, and model_state of data_parallel
    "synchronized": ("data", None),
    "local": (None, "mean"),
}


class Block(nn.Module):
    """Two convolutions beside a shortcut: He et al., CVPR 2016."""

    channels: int
    stride: int
    axis_name: str | None

    @nn.compact
    def __call__(self, x, train):
        """`[rows, H, W, any]` to `[rows, H / stride, W / stride, channels]`."""
        norm = batch_norm(self.axis_name, train)
        strides = (self.stride, self.stride)
        y = nn.Conv(self.channels, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(y)
        y = norm()(y)
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.channels, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A convolution, blocks that halve the image from the second on, and a mean."""

    widths: tuple[int, ...] = (16, 32, 64)
    axis_name: str | None = None

    @nn.compact
    def __call__(self, images, train):
        """`[rows, 8, 8, 1]` to `[rows, 10]`."""
        x = nn.Conv(self.widths[0], (3, 3), use_bias=False)(images)
        x = nn.relu(batch_norm(self.axis_name, train)()(x))
        for i, width in enumerate(self.widths):
            x = Block(width, 1 + (i > 0), self.axis_name)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


def batch_norm(axis_name, train):
    """BatchNorm with its options: a class for all that this network needs."""
    return functools.partial(
        nn.BatchNorm,
        use_running_average=not train,
        axis_name=axis_name,
        momentum=0.9,
        use_fast_variance=False,  # E[x²] - E[x]², the default, may cancel
    )


def take(data, rows):
    """Some rows of all arrays."""
    return {name: array[rows] for name, array in data.items()}


def load_data(seed):
    """Training and test images, shuffled."""
    pixels, labels = load_digits(return_X_y=True)
    images = np.float32(pixels).reshape(-1, 8, 8, 1) / 16  # brightness 0 to 1
    data = {"image": images, "label": np.int32(labels)}
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = np.split(order, [TEST_ROWS])
    return take(data, train), take(data, test)


def main(norm="synchronized", epochs=4, widths=(16, 32, 64), lr=5e-3, devices=None):
    """Trains, prints and returns what came of it."""
    mesh = jaxdp.data_mesh(devices)
    axis_name, policy = NORMS[norm]
    net = ResNet(widths, axis_name)
    train_data, test_data = load_data(seed=0)

    def loss_fn(params, batch, model_state):
        logits, model_state = net.apply(
            {"params": params, **model_state},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        labels = batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        hits = jnp.mean(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.float32)
        return losses.mean(), jaxdp.Aux({"accuracy": hits}, model_state)

    @jax.jit
    def guess(variables, images):
        logits: Any = net.apply(variables, images, train=False)
        return jnp.argmax(logits, axis=-1)

    variables = net.init(jax.random.key(0), train_data["image"][:1], train=False)
    model_state = {"batch_stats": variables["batch_stats"]}
    train = jaxdp.data_parallel(loss_fn, optax.adam(lr), mesh, model_state=policy)
    state = train.init(variables["params"], model_state=model_state)

    # "drop" leaves out what fills no batch: no masks, and all batches are alike.
    sampler = jaxdp.Sampler(
        *(len(train_data["label"]), 64),
        remainder="drop",
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    losses = []
    for epoch in range(epochs):
        for rows in sampler:
            batch = jaxdp.shard_batch(take(train_data, rows.indices), mesh)
            state, metrics = train.step(state, batch)
            losses.append(metrics["loss"])
        if jaxdp.process_zero():
            loss, hits = metrics["loss"], metrics["accuracy"]
            print(f"epoch {epoch + 1}: loss {loss:.4f}, {hits:.0%} of the batch")

    # The whole parameters and statistics, on one device: the model as it is served.
    variables = jaxdp.fetch({"params": train.params(state), **train.model_state(state)})
    guesses = guess(variables, test_data["image"])
    accuracy = float(np.mean(guesses == test_data["label"]))
    if jaxdp.process_zero():
        print(f"{norm}: {accuracy:.1%} of {TEST_ROWS} test images, {mesh.size} devices")
    return {"losses": np.array(losses), "accuracy": accuracy, "state": state}


if __name__ == "__main__":
    if "JAX_NUM_CPU_DEVICES" not in os.environ:  # the launcher sets it
        jax.config.update("jax_num_cpu_devices", 8)  # used if there are no GPUs
    jaxdp.initialize()  # joins the other processes, if there are any
    for each in NORMS:
        main(each)
