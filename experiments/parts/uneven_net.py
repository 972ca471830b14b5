"""Digits and a network with BatchNorm, and its gradient on one device, from Flax alone.

The reference shares nothing with the library: `flax.nnx.BatchNorm` on the real rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from sklearn.datasets import load_digits

import jaxdp
from jaxdp.data import PaddedBatch

PyTree = Any
Batch = tuple[Any, Any]  # images [rows, 8, 8, 1], labels [rows]


class Network(NamedTuple):
    """A network as a function, and what it starts from.

    Attributes:
        apply: `apply(params, model_state, images, **keywords)`: logits and the next
            model state; the keywords reach BatchNorm.
        params: Parameters.
        model_state: Running averages.
    """

    apply: Callable[..., tuple[jax.Array, PyTree]]
    params: PyTree
    model_state: PyTree


class Measured(NamedTuple):
    """What one step measures before its update."""

    loss: Any
    accuracy: Any
    gradient: PyTree
    model_state: PyTree


class NormNet(nnx.Module):
    """Two convolutions with BatchNorm and two linear layers, for 8 x 8 images.

    Nothing has a kink: at that of a ReLU one last bit decides whether a whole row of
    gradients is there, and 1e-7 becomes 1e-5.
    """

    def __init__(self, norm: Callable[..., nnx.Module], rngs: nnx.Rngs):
        """Makes 38,378 parameters."""
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = norm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.norm2 = norm(32, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(512, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array, **keywords: Any) -> jax.Array:
        """Images to logits."""
        x = nnx.silu(self.norm1(self.conv1(x), **keywords))
        x = nnx.silu(self.norm2(self.conv2(x), **keywords))
        x = nnx.silu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.head(x)


@functools.cache
def data() -> Batch:
    """All 1,797 digits: brightness 0 to 1, and labels."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))  # [1797, 64]
    return (pixels / 16).astype("f").reshape(-1, 8, 8, 1), labels.astype(np.int32)


def take(batch: Batch, rows: Any) -> Batch:
    """Some rows of images and labels."""
    images, labels = batch
    return images[rows], labels[rows]


def padded(length: int, size: int, mesh: Mesh) -> PaddedBatch:
    """The first rows as one batch of a size on a mesh."""
    sampler = jaxdp.Sampler(length, size, shuffle=False)
    return next(iter(jaxdp.epoch_batches(take(data(), slice(length)), sampler, mesh)))


@functools.cache
def start() -> tuple[PyTree, PyTree]:
    """Parameters and running averages, the same for every kind of BatchNorm."""
    module = nnx.jit(lambda: NormNet(nnx.BatchNorm, nnx.Rngs(0)))()
    _, *parts = nnx.split(module, nnx.Param, ...)
    params, model_state = map(nnx.to_pure_dict, parts)
    return params, model_state


def network(norm: Callable[..., nnx.Module], **options: Any) -> Network:
    """The network with one kind of BatchNorm."""
    make = functools.partial(norm, **options)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: NormNet(make, nnx.Rngs(0))))

    def apply(params, model_state, images, **keywords):
        merged = nnx.merge(graphdef, nnx.State(params), nnx.State(model_state))
        logits = merged(images, **keywords)
        return logits, nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat))

    return Network(apply, *start())


def losses(logits: jax.Array, labels: Any) -> jax.Array:
    """One loss per row."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def parallel_loss(net: Network) -> Callable[..., Any]:
    """The loss of one replica's rows, for `jaxdp.data_parallel`."""

    def loss_fn(params, batch, mask, model_state):
        images, labels = batch
        logits, model_state = net.apply(params, model_state, images, mask=mask)
        correct = (jnp.argmax(logits, -1) == labels).astype("f")
        metrics = {"accuracy": jaxdp.masked_mean(correct, mask)}
        loss = jaxdp.masked_mean(losses(logits, labels), mask)
        return loss, jaxdp.Aux(metrics, model_state)

    return loss_fn


@functools.cache
def one_device() -> Callable[[PyTree, PyTree, Batch], Measured]:
    """The reference: takes real rows only."""
    net = network(nnx.BatchNorm, use_fast_variance=False)

    def loss_fn(params, model_state, batch):
        images, labels = batch
        logits, model_state = net.apply(params, model_state, images)
        correct = jnp.argmax(logits, -1) == labels
        return losses(logits, labels).mean(), (correct.mean(), model_state)

    @jax.jit
    def measure(params, model_state, batch):
        step = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (accuracy, model_state)), gradient = step(params, model_state, batch)
        return Measured(loss, accuracy, gradient, model_state)

    return measure


def recording(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """The optimizer; its state is a pair, with the last gradient as the second."""

    def init(params):
        return optimizer.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        inner, _ = state
        new, inner = optimizer.update(updates, inner, params)
        return new, (inner, updates)

    return optax.GradientTransformation(init, update)


def largest(tree: PyTree) -> float:
    """Largest absolute value of any entry."""
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def difference(tree: PyTree, reference: PyTree) -> float:
    """Largest absolute difference of any entry."""
    return largest(jax.tree.map(lambda a, b: np.asarray(a) - b, tree, reference))
