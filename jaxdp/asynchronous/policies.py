"""Who waits for whom, and how many pushes make an update: the policies of a server.

A worker's *clock* is the number of iterations it has finished; it starts iteration `t`
when its clock is `t`. A *round* ends when the server has as many pushes as make one
update. A policy is a few pure functions of these counters, so that a simulated run and
a real one decide alike:

    policy       pushes per update   iteration t starts when
    Sequential   one of each worker  round t - 1 has ended
    Eventual     1                   always
    Bounded(s)   1                   all workers' pushes up to t - 1 - s are done with
    Backup(b)    the first W - b     the round that the worker was in has ended

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
OSDI 2014, section 3.4 (sequential, eventual, bounded delay); Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013, section 3
(the sliding bound); Chen et al., "Revisiting Distributed Synchronous SGD", 2016,
section 3 (backup workers).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


class Policy:
    """What all policies answer; the defaults are those of `Eventual`."""

    def check(self, workers: int) -> None:
        """Refuses a number of workers that the policy cannot serve.

        Raises:
            ValueError: Too few of them.
        """
        check_count("a server", "workers", workers, at_least=1)

    def pushes_per_update(self, workers: int) -> int:
        """How many pushes end a round."""
        del workers
        return 1

    def next_iteration(self, clock: int, rounds: int) -> int:
        """The iteration that a worker starts next.

        Args:
            clock: The worker's.
            rounds: How many have ended.
        """
        del rounds
        return clock

    def waits_for(
        self, iteration: int, clocks: Sequence[int], rounds: int
    ) -> list[int]:
        """The workers whose pushes are missing before `iteration` may start.

        Args:
            iteration: What `next_iteration` gave.
            clocks: One per worker.
            rounds: How many have ended.

        Returns:
            Their numbers; empty if it may start.
        """
        del iteration, clocks, rounds
        return []

    def is_late(self, iteration: int, rounds: int) -> bool:
        """Whether a push comes after its round, and is dropped.

        Args:
            iteration: Of which it is the gradient.
            rounds: How many have ended.
        """
        del iteration, rounds
        return False


class _Rounds(Policy):
    """Policies whose iterations are rounds."""

    def waits_for(
        self, iteration: int, clocks: Sequence[int], rounds: int
    ) -> list[int]:
        """All who have not pushed in the open round."""
        if iteration <= rounds:
            return []
        return [worker for worker, clock in enumerate(clocks) if clock <= rounds]


@dataclasses.dataclass(frozen=True)
class Sequential(_Rounds):
    """Bulk-synchronous: an update averages one push of every worker."""

    def pushes_per_update(self, workers: int) -> int:
        """All of them."""
        return workers


@dataclasses.dataclass(frozen=True)
class Eventual(Policy):
    """No bound: every push is an update, in order of arrival, and nobody waits."""


@dataclasses.dataclass(frozen=True)
class Bounded(Policy):
    """As `Eventual`, but no worker runs further ahead of the slowest than a bound.

    Attributes:
        max_staleness: Iterations that a worker may be ahead of the slowest one; 0 lets
            all start an iteration on weights that hold every push of the one before.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        """Refuses what is no bound."""
        remedy = "Pass one; for no bound on staleness, use Eventual()."
        check_count("Bounded", "max_staleness", self.max_staleness, 0, remedy)

    def waits_for(
        self, iteration: int, clocks: Sequence[int], rounds: int
    ) -> list[int]:
        """All who are further behind than the bound."""
        del rounds
        required = iteration - self.max_staleness
        return [worker for worker, clock in enumerate(clocks) if clock < required]


@dataclasses.dataclass(frozen=True)
class Backup(_Rounds):
    """Synchronous with backup workers: the slowest pushes of a round are dropped.

    A late worker skips the rounds that it missed: they count into its clock.

    Attributes:
        extra: How many workers of a round are not waited for.
    """

    extra: int

    def __post_init__(self) -> None:
        """Refuses what is no number of workers."""
        check_count("Backup", "extra", self.extra, at_least=0)

    def check(self, workers: int) -> None:
        """Refuses to drop every push.

        Raises:
            ValueError: Not more workers than are dropped.
        """
        super().check(workers)
        if self.extra >= workers:
            raise ValueError(
                f"Backup got extra={self.extra} for {workers} workers. An update "
                f"averages workers - extra = {workers - self.extra} pushes, and needs "
                f"at least 1. Take extra <= {workers - 1}."
            )

    def pushes_per_update(self, workers: int) -> int:
        """The first ones."""
        return workers - self.extra

    def next_iteration(self, clock: int, rounds: int) -> int:
        """The open round, or the next one for a worker that has pushed in it."""
        return max(clock, rounds)

    def is_late(self, iteration: int, rounds: int) -> bool:
        """Its round has ended."""
        return iteration < rounds


def check_count(
    caller: str, name: str, value: Any, at_least: int, remedy: str = "Pass one."
) -> None:
    """Refuses what is no integer of at least `at_least`.

    Raises:
        TypeError: No integer; ends with the remedy.
        ValueError: Too small.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(
            f"{caller} got {name}={value!r}. It must be an integer of at least "
            f"{at_least}. {remedy}"
        )
    if value < at_least:
        raise ValueError(
            f"{caller} got {name}={value}. It must be at least {at_least}. Pass "
            f"{at_least} or more."
        )
