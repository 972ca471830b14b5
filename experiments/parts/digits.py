"""Scikit-learn's digits and a small network: real data that ships inside a package."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

from experiments import models

PyTree = Any
Batch = tuple[np.ndarray, np.ndarray]  # images [rows, 8, 8, 1], labels [rows]
TRAIN_ROWS, TEST_ROWS = 1437, 360


class Problem(NamedTuple):
    """What all runs start from."""

    apply: Callable[[PyTree, Any], jax.Array]
    params: PyTree
    optimizer: optax.GradientTransformation
    train: Batch
    test: Batch

    def loss_fn(self, params: PyTree, batch: Batch) -> jax.Array:
        """The mean loss of a batch."""
        images, labels = batch
        logits = self.apply(params, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    def accuracy(self, params: PyTree) -> float:
        """Share of the test images that are recognised."""
        images, labels = self.test
        guesses = np.argmax(jax.jit(self.apply)(params, images), axis=-1)
        return float(np.mean(guesses == labels))


def problem(seed: int, learning_rate: float, momentum: float) -> Problem:
    """Splits the digits by seed, and makes the network."""
    apply, params = models.functional(models.DigitsNet, seed)
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))  # [1797, 64]
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)  # brightness 0 to 1
    labels = labels.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = (
        (images[rows], labels[rows]) for rows in (order[:TEST_ROWS], order[TEST_ROWS:])
    )
    optimizer = optax.sgd(learning_rate, momentum=momentum)
    return Problem(apply, params, optimizer, train, test)


def batches(data: Batch, size: int, epochs: int, seed: int) -> Iterator[Batch]:
    """Whole batches, shuffled by seed; what is left of an epoch is not used."""
    images, labels = data
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(labels))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield images[rows], labels[rows]
