"""Flax NNX: a small network learns scikit-learn's digits, on all devices at once.

    python docs/examples/nnx_digits.py                       # GPUs, or 8 CPU devices
    python -m jaxdp.launch -n 2 docs/examples/nnx_digits.py  # two processes

It takes some seconds on two cores, and recognises more than 95 % of 360 images that it
has not seen. Put another design in the place of `RingAllReduce`, and it trains the same
numbers, up to rounding.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxdp

TEST_ROWS = 360  # of 1797


class Net(nnx.Module):
    """A convolution and two dense layers."""

    def __init__(self, rngs: nnx.Rngs):
        """Makes 17,258 parameters."""
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(16 * 4 * 4, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images):
        """`[rows, 8, 8, 1]` to `[rows, 10]`."""
        x = nnx.max_pool(nnx.relu(self.conv(images)), (2, 2), strides=(2, 2))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.out(x)


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


def sampler_of(data, batch_size, **options):
    """Batches of rows; each process takes its share of every batch."""
    return jaxdp.Sampler(
        *(len(data["label"]), batch_size),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        **options,
    )


def main(epochs=10, devices=None):
    """Trains, prints and returns what came of it."""
    mesh = jaxdp.data_mesh(devices)
    train_data, test_data = load_data(seed=0)

    # NNX modules hold their parameters. Split into a definition, which is static, and
    # the parameters, they are a function and a tree, which is what JAX works on.
    graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, batch, mask):
        logits = nnx.merge(graphdef, params)(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jaxdp.masked_mean(losses, mask)  # rows that fill up a batch do not count

    @jax.jit
    def count_hits(params, padded):
        logits = nnx.merge(graphdef, params)(padded.batch["image"])
        hits = jnp.argmax(logits, axis=-1) == padded.batch["label"]
        return jnp.sum(hits & padded.mask)

    def accuracy(params):
        batches = jaxdp.epoch_batches(test_data, test_sampler, mesh, epoch=0)
        hits = sum(int(count_hits(params, padded)) for padded in batches)
        return hits / test_sampler.length

    train = jaxdp.data_parallel(
        loss_fn, optax.adam(5e-3), mesh, jaxdp.RingAllReduce(bucket_cap_mb=25.0)
    )
    state = train.init(params)
    sampler = sampler_of(train_data, 64, seed=0)
    test_sampler = sampler_of(test_data, 128, shuffle=False)

    losses = []
    for epoch in range(epochs):
        for padded in jaxdp.epoch_batches(train_data, sampler, mesh):
            state, metrics = train.step(state, padded)
            losses.append(metrics["loss"])  # not read yet: the step may still run
        if jaxdp.process_zero():
            print(f"epoch {epoch + 1:2}: loss {losses[-1]:.4f}")
    found = accuracy(train.params(state))
    if jaxdp.process_zero():
        print(
            f"{found:.1%} of {test_sampler.length} test images on {mesh.size} devices"
        )
    return {"losses": np.array(losses), "accuracy": found, "state": state}


if __name__ == "__main__":
    if "JAX_NUM_CPU_DEVICES" not in os.environ:  # the launcher sets it
        jax.config.update("jax_num_cpu_devices", 8)  # used if there are no GPUs
    jaxdp.initialize()  # joins the other processes, if there are any
    main()
