"""How the loss of a run came down: over pushes, and over virtual time."""

from typing import NamedTuple

import numpy as np

from jaxdp.asynchronous import Run

WORST = 1e6  # stands for all higher losses, infinite ones and NaN
LAST = 0.2  # share of pushes or time over which a loss is averaged: it is noisy


class Curve(NamedTuple):
    """Evaluations of the server's parameters.

    Attributes:
        pushes: How many were applied.
        times_ms: When, in virtual time.
        losses: On the same rows of the training data.
    """

    pushes: np.ndarray
    times_ms: np.ndarray
    losses: np.ndarray

    @property
    def mean(self) -> float:
        """The average over the whole run: low if the loss came down early."""
        return _mean(self.pushes, self.losses, 0, self.pushes[-1])

    @property
    def at_the_end(self) -> float:
        """Over the last fifth of the pushes."""
        end = self.pushes[-1]
        return _mean(self.pushes, self.losses, (1 - LAST) * end, end)

    def at_ms(self, end_ms: float) -> float:
        """Over the last fifth of the time until `end_ms`."""
        return _mean(self.times_ms, self.losses, (1 - LAST) * end_ms, end_ms)

    def highest_after(self, share: float) -> float:
        """The highest loss after a share of the pushes, or the initial one if less."""
        late = self.pushes >= share * self.pushes[-1]
        return float(min(self.losses[late].max(), self.losses[0]))

    def in_words(self, loss: float) -> float | str:
        """A cell of a table; a loss above the initial one has diverged."""
        return loss if loss <= self.losses[0] else "diverged"


def curve(run: Run) -> Curve:
    """The evaluations of a run."""
    versions, times_s, losses = np.transpose(run.evaluations)
    pushes = versions * run.policy.pushes_per_update(run.workers)
    finite = np.nan_to_num(losses, nan=WORST, posinf=WORST)
    return Curve(pushes, 1e3 * times_s, np.minimum(finite, WORST))


def _mean(x: np.ndarray, y: np.ndarray, low: float, high: float) -> float:
    """The mean of a piecewise linear curve from `low` to `high`."""
    inside = x[(low < x) & (x < high)]
    points = np.concatenate([[low], inside, [high]])
    return float(np.trapezoid(np.interp(points, x, y), points) / (high - low))
