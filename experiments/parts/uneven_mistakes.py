"""What becomes of gradients and metrics if padding is not masked everywhere."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdp
from experiments.harness.result import Rows
from experiments.parts import uneven_net as net
from experiments.parts.uneven_net import difference, largest
from jaxdp.data import PaddedBatch

PyTree = Any
RIGHT = "everything masked (jaxdp)"
NO_NUMBER = "not a number"
BALANCED = (
    "The last batch repeats its rows, all of them about equally often, until it is as "
    "large as the others: with copies counted it weighs as much as they do, as in a "
    "mean of batch means."
)


class Way(NamedTuple):
    """A way to treat padding.

    Attributes:
        name: In words.
        norm: BatchNorm and its options.
        masks_norm: Whether BatchNorm knows which rows are real.
        loss: From one loss per row and the mask to what `loss_fn` returns.
        zeros: Whether padded rows are zeros, and not copies.
    """

    name: str
    norm: tuple[Any, dict[str, Any]]
    masks_norm: bool
    loss: Callable[[jax.Array, jax.Array], jaxdp.Mean]
    zeros: bool = False


def unmasked(values: jax.Array, mask: jax.Array) -> jaxdp.Mean:
    """All rows count."""
    return jaxdp.masked_mean(values, jnp.ones_like(mask))


def mean_of_means(values: jax.Array, mask: jax.Array) -> jaxdp.Mean:
    """Every replica has the same weight, as in DDP."""
    total, weight = jaxdp.masked_mean(values, mask)
    return jaxdp.Mean(total / jnp.maximum(weight, 1), 1.0)


OURS = jaxdp.BatchNorm, {"axis_name": "data"}
FLAX = nnx.BatchNorm, {"axis_name": "data", "use_fast_variance": False}
WAYS = (
    Way("zeros, all rows count", OURS, False, unmasked, zeros=True),
    Way("copies, all rows count", OURS, False, unmasked),
    Way("mask in the loss only", OURS, False, jaxdp.masked_mean),
    Way("mask in BatchNorm only", OURS, True, unmasked),
    Way("BatchNorm of each device", (jaxdp.BatchNorm, {}), True, jaxdp.masked_mean),
    Way("BatchNorm, mean of means (Flax)", FLAX, True, jaxdp.masked_mean),
    Way("loss, mean of means", OURS, True, mean_of_means),
    Way(RIGHT, OURS, True, jaxdp.masked_mean),
)


def gradients(
    ways: Sequence[Way],
    real: Sequence[int],
    devices: int,
    batch_size: int,
    advance: Callable[[], None],
) -> Rows:
    """Compares the gradient of each way, at the first parameters, with one device's.

    Args:
        ways: To treat padding.
        real: How many of the rows of a batch are real; a column for each.
        devices: Number of replicas.
        batch_size: Rows of a batch.
        advance: Called after each way.

    Returns:
        A row per way; differences relative to the largest entry of the gradient, or
        `NO_NUMBER`.
    """
    mesh, alone = jaxdp.data_mesh(devices), net.one_device()
    rows = []
    for way in ways:
        norm, options = way.norm
        given = net.network(norm, **options)
        optimizer = net.recording(optax.sgd(0.0))
        train = jaxdp.data_parallel(loss_of(way, given), optimizer, mesh)
        row: dict[str, Any] = {"padding": way.name}
        for count in real:
            padded = net.padded(count, batch_size, mesh)
            padded = zeroed(padded) if way.zeros else padded
            state, _ = train.step(train.init(given.params), padded)
            batch = net.take(net.data(), slice(count))
            expected = alone(given.params, given.model_state, batch).gradient
            apart = difference(state.opt_state[1], expected) / largest(expected)
            column = f"{count} real rows of {batch_size}"
            row[column] = apart if np.isfinite(apart) else NO_NUMBER
        rows.append(row)
        advance()
    return rows


def loss_of(way: Way, given: net.Network) -> Callable[..., jaxdp.Mean]:
    """The loss of one replica's rows; running averages are left as they are."""

    def loss_fn(params, batch, mask):
        images, labels = batch
        keywords = {}
        if way.masks_norm:  # Flax takes a mask that broadcasts to its input
            flax = way.norm[0] is nnx.BatchNorm
            keywords["mask"] = mask.reshape(-1, 1, 1, 1) if flax else mask
        logits, _ = given.apply(params, given.model_state, images, **keywords)
        return way.loss(net.losses(logits, labels), mask)

    return loss_fn


def zeroed(padded: PaddedBatch) -> PaddedBatch:
    """The batch with zeros where it had copies."""

    def zero(leaf):
        return leaf * padded.mask.reshape(-1, *[1] * (leaf.ndim - 1))

    return PaddedBatch(jax.tree.map(zero, padded.batch), padded.mask)


def evaluation(
    params: PyTree, model_state: PyTree, length: int, devices: int, batch_size: int
) -> Rows:
    """Accuracy and loss of a data set, counted in three ways.

    Args:
        params: Of a trained network.
        model_state: Its running averages.
        length: Rows of the data set, the first digits.
        devices: Of the mesh that evaluates.
        batch_size: Rows of a batch.
    """
    given = net.network(jaxdp.BatchNorm)
    mesh = jaxdp.data_mesh(devices)

    @jax.jit
    def measure(padded: PaddedBatch, mask: jax.Array) -> jaxdp.Mean:
        images, labels = padded.batch
        logits, _ = given.apply(params, model_state, images, use_running_average=True)
        correct = jnp.argmax(logits, -1) == labels
        values = jnp.stack([correct.astype("f"), net.losses(logits, labels)], 1)
        real = jnp.where(mask[:, None], values, 0)
        return jaxdp.Mean(real.sum(0), mask.sum())

    data = net.take(net.data(), slice(length))
    sampler = jaxdp.Sampler(length, batch_size, shuffle=False)
    batches = [*jaxdp.epoch_batches(data, sampler, mesh, epoch=0)]
    masked = [jax.device_get(measure(each, each.mask)) for each in batches]
    every = [
        jax.device_get(measure(each, jnp.ones_like(each.mask))) for each in batches
    ]
    by_batch = np.mean([mean.total / mean.weight for mean in masked], axis=0)
    ways = {
        RIGHT: summed(masked),
        "copies counted": summed(every),
        "mean of batch means": (by_batch, length),
    }
    return [
        {
            "metrics": name,
            "label": BALANCED,
            "rows counted": int(weight),
            "accuracy": float(means[0]),
            "loss": float(means[1]),
        }
        for name, (means, weight) in ways.items()
    ]


def summed(means: list[jaxdp.Mean]) -> tuple[np.ndarray, Any]:
    """The mean over batches, and its weight."""
    total, weight = jax.tree.map(lambda *parts: sum(parts), *means)
    return total / weight, weight
