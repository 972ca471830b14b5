"""TinyNet on random images: where every way of training starts from."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments import models

PyTree = Any


class Problem(NamedTuple):
    """What a step starts from."""

    apply: Callable[[PyTree, Any], jax.Array]
    params: PyTree
    optimizer: optax.GradientTransformation
    images: np.ndarray  # [B, 32, 32, 3]
    labels: np.ndarray  # [B]

    def losses(self, params: PyTree, images: Any, labels: Any) -> jax.Array:
        """One loss per row."""
        return entropy(self.apply(params, images), labels)

    def loss_fn(self, params: PyTree, batch: tuple[Any, Any]) -> jax.Array:
        """The mean loss of a batch."""
        return self.losses(params, *batch).mean()


def tiny_net(batch_size: int, learning_rate: float) -> Problem:
    """TinyNet, SGD with momentum, random images."""
    apply, params = models.functional(models.TinyNet, seed=0)
    optimizer = optax.sgd(learning_rate, momentum=0.9)
    return Problem(apply, params, optimizer, *random_batch(batch_size))


def random_batch(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels."""
    random = np.random.default_rng(0)
    images = random.normal(size=(size, 32, 32, 3)).astype(np.float32)
    return images, random.integers(0, 10, size).astype(np.int32)


def entropy(logits: jax.Array, labels: Any) -> jax.Array:
    """One loss per row."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def mean_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    """The mean over rows."""
    return entropy(logits, labels).mean()


def on_one_device(given: Problem) -> tuple[PyTree, PyTree]:
    """The gradient of the whole batch, and the parameters after one step."""
    batch = (given.images, given.labels)
    gradient = jax.jit(jax.grad(given.loss_fn))(given.params, batch)
    opt_state = given.optimizer.init(given.params)
    updates, _ = given.optimizer.update(gradient, opt_state, given.params)
    return gradient, optax.apply_updates(given.params, updates)
