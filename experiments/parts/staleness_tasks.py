"""What asynchronous workers train: two data sets, three optimizers, and their rates.

A synchronous update averages the pushes of all W workers; an asynchronous one is made
from a single push, so that W of them at the same rate go W times as far. At an equal
rate per sample

    SGD, momentum   rate / W    the sum of W small steps is one step along their mean
    Adam            rate / √W   it divides by the size of the gradient, which for a
                                single push is mostly noise, √W times that of the mean

(Adam: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms",
2022.) Momentum and Adam's moments keep their coefficients, as a user's would: they
average over as many updates, and so over W times fewer samples.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from experiments.parts import digits, text

ROWS = {"digits": 8, "text": 4}  # of a push: images, stretches of text
EVALUATED = {"digits": 256, "text": 64}  # rows
# Half of what is best for the synchronous run, or less: at the edge of stability every
# delay is too long. At the best rate of momentum on text, 0.2, even τ = 0 diverges.
RATES = {
    "digits": {"SGD": 0.1, "momentum": 0.02, "Adam": 0.005},
    "text": {"SGD": 0.2, "momentum": 0.02, "Adam": 0.005},
}
OPTIMIZERS: Mapping[str, Callable[[float], optax.GradientTransformation]] = {
    "SGD": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "Adam": optax.adam,
}


class Task(NamedTuple):
    """One data set and its model.

    Attributes:
        name: "digits" or "text".
        loss_fn: The mean loss of a batch.
        params: The initial parameters as one vector, `[size]`, as servers keep them:
            a message is one array, which the simulation handles faster than many.
        batches: The batch of `(worker, iteration)`.
        evaluate: The loss of rows of the training data that are always the same.
        test: The same of rows that are not in the training data.
    """

    name: str
    loss_fn: Callable[[jax.Array, Any], jax.Array]
    params: jax.Array
    batches: Callable[[int, int], Any]
    evaluate: Callable[[jax.Array], float]
    test: Callable[[jax.Array], float]

    @property
    def size_bytes(self) -> int:
        """Of the parameters, and so of a push or pull."""
        return self.params.nbytes


def digits_task(seed: int) -> Task:
    """Images of digits; the seed is of parameters, split and batches."""

    def draw(data: digits.Batch, rows: int, random: np.random.Generator) -> Any:
        images, labels = data
        chosen = random.integers(0, len(labels), rows)
        return images[chosen], labels[chosen]

    return _task("digits", digits.problem(seed, 0.0, 0.0), draw, seed)


def text_task(seed: int) -> Task:
    """Stretches of text; the seed is of parameters, split and batches."""
    return _task("text", text.problem(seed), text.windows, seed)


def _task(
    name: str,
    problem: digits.Problem | text.Problem,
    draw: Callable[[Any, int, np.random.Generator], Any],
    seed: int,
) -> Task:
    flat, unravel = ravel_pytree(problem.params)
    loss = jax.jit(lambda params, batch: problem.loss_fn(unravel(params), batch))
    seen, unseen = (
        draw(data, EVALUATED[name], np.random.default_rng(seed))
        for data in (problem.train, problem.test)
    )

    def batches(worker: int, iteration: int) -> Any:
        random = np.random.default_rng([seed, worker, iteration])
        return draw(problem.train, ROWS[name], random)

    return Task(
        name=name,
        loss_fn=loss,
        params=flat,
        batches=batches,
        evaluate=lambda params: float(loss(params, seen)),
        test=lambda params: float(loss(params, unseen)),
    )


@functools.cache  # the same object each time: runs share what is compiled for it
def optimizer(name: str, rate: float) -> optax.GradientTransformationExtraArgs:
    """One of `OPTIMIZERS`."""
    return optax.with_extra_args_support(OPTIMIZERS[name](rate))


def rate_of_a_push(task: str, name: str, workers: int) -> float:
    """The asynchronous rate that is equal, per sample, to the synchronous one."""
    return RATES[task][name] / (math.sqrt(workers) if name == "Adam" else workers)
