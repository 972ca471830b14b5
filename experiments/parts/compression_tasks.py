"""What is trained with compressed gradients: digits, and text.

Adam, whose rate rises for a tenth of the steps and then falls along a cosine, for both:
at a rate that stays high, runs end where the noise of their last steps leaves them, and
differ by more than compression costs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments import models
from experiments.parts import digits, text

PyTree = Any
EVALUATED = 512  # stretches of text
RATES = {"digits": 0.003, "text": 0.006}
ROWS = {"digits": 128, "text": 48}  # of a batch, over all devices


class Task(NamedTuple):
    """One data set, its model, and the batches of all its runs.

    Attributes:
        name: "digits" or "text".
        loss_fn: The mean loss of a batch.
        params: The initial parameters.
        optimizer: Adam.
        batches: One for every step.
        test: Loss, and share of right answers, on data that is not for training.
    """

    name: str
    loss_fn: Callable[[PyTree, Any], jax.Array]
    params: PyTree
    optimizer: optax.GradientTransformation
    batches: Sequence[Any]
    test: Callable[[PyTree], tuple[float, float]]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the parameters."""
        return [leaf.shape for leaf in jax.tree.leaves(self.params)]


def digits_task(steps: int, seed: int) -> Task:
    """Images of digits and a small CNN."""
    problem = digits.problem(seed, 0.0, 0.0)
    per_epoch = len(problem.train[1]) // ROWS["digits"]
    epochs = -(-steps // per_epoch)
    batches = [*digits.batches(problem.train, ROWS["digits"], epochs, seed)][:steps]
    return _task("digits", problem, batches, problem.test)


def text_task(steps: int, width: int, seed: int) -> Task:
    """Stretches of text and a transformer of this width."""
    make = functools.partial(models.CharTransformer, width=width)
    problem = text.Problem(*models.functional(make, seed), *text.split(seed))
    random = np.random.default_rng(seed)
    windows = [text.windows(problem.train, ROWS["text"], random) for _ in range(steps)]
    unseen = text.windows(problem.test, EVALUATED, random)
    return _task("text", problem, windows, (unseen[:, :-1], unseen[:, 1:]))


def _task(
    name: str,
    problem: digits.Problem | text.Problem,
    batches: Sequence[Any],
    unseen: tuple[np.ndarray, np.ndarray],
) -> Task:
    """Adds the optimizer and the test."""
    inputs, labels = unseen
    steps, rate = len(batches), RATES[name]
    rates = optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps, rate / 20)

    @jax.jit
    def measure(params):
        logits = problem.apply(params, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    def test(params):
        loss, accuracy = measure(params)
        return float(loss), float(accuracy)

    return Task(name, problem.loss_fn, problem.params, optax.adam(rates), batches, test)
