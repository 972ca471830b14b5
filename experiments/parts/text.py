"""The reference of the Python language and a small transformer: text inside Python.

`pydoc_data.topics` holds what `help("for")` prints, almost half a million characters of
English and grammar. It differs a little between Python versions.
"""

import pydoc_data.topics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments import models

PyTree = Any
# Characters [rows, CONTEXT + 1]: each but the last foretells the next.
Batch = np.ndarray
CONTEXT = 32
TRAIN_SHARE = 0.9


class Problem(NamedTuple):
    """What all runs start from."""

    apply: Callable[[PyTree, Any], jax.Array]
    params: PyTree
    train: np.ndarray  # ASCII codes
    test: np.ndarray  # of the topics that are not for training

    def loss_fn(self, params: PyTree, batch: Batch) -> jax.Array:
        """The mean loss of a character, in nats."""
        logits = self.apply(params, batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()


def problem(seed: int) -> Problem:
    """Makes the network, and splits the text, by seed."""
    apply, params = models.functional(models.CharTransformer, seed)
    return Problem(apply, params, *split(seed))


def split(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Takes topics for training and for the test."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    order = np.random.default_rng(seed).permutation(len(topics))
    cut = round(TRAIN_SHARE * len(topics))
    train, test = (
        codes("\n".join(topics[i] for i in chosen))
        for chosen in (order[:cut], order[cut:])
    )
    return train, test


def codes(text: str) -> np.ndarray:
    """Text as ASCII codes; what is not ASCII becomes a question mark."""
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def windows(text: np.ndarray, rows: int, random: np.random.Generator) -> Batch:
    """Takes stretches of the text, from random places."""
    starts = random.integers(0, len(text) - CONTEXT, rows)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]
