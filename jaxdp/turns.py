"""Collectives that take turns: few travel at a time, in the order they are given in.

A step of many buckets has as many rings that could all travel during the backward pass.
XLA's scheduler for GPUs then starts rounds of them side by side, where one waits for
the other on the only link, and leaves later kernels without any transfer beside them.
If a ring's first round waits for the last one of an earlier ring, there is one order,
and the scheduler finds a kernel for nearly every round.

What waits is what the first round sends, by a dependence on data that is never true
(`jaxdp.waiting`): packing, additions and results wait for nothing else than before.

Why this way: steps of 8 H100, compiled by jax 0.10.2, rings of 25 MiB, predicted for
450 GB/s, in ms, and the share of the communication that is exposed:

    at a time       GPT-2 small     ResNet-50
    one             36.3   24 %     12.7   20 %
    two             36.2   23 %     13.1   53 %
    all             38.4   76 %     13.5   83 %

Waiting for a ring's result instead of its last round, GPT-2 took 37.7 ms and 53 %.
Rounds tied to places of the backward pass took 37.2 ms and 42 %: there they gather.
"""

import dataclasses

import jax

from jaxdp.primitive import Collective
from jaxdp.schedule import Schedule


class Turns:
    """Hands out turns, inside one traced program.

    Attributes:
        in_flight: How many collectives may travel at a time; None for any number.
    """

    def __init__(self, in_flight: int | None):
        """Nothing travels yet."""
        self.in_flight = in_flight
        self._landed: list[jax.Array] = []

    def take(self, collective: Collective) -> "Collective | InTurn":
        """The collective, so that calls of it wait for their turn."""
        return collective if self.in_flight is None else InTurn(collective, self)

    def run(self, collective: Collective, chunks: jax.Array) -> jax.Array:
        """Runs a collective when few enough of those before it still travel."""
        assert self.in_flight is not None
        if not chunks.size:
            return collective(chunks)
        waits = self._landed[-self.in_flight :]
        after = waits[0] if len(waits) == self.in_flight else None
        result, landed = collective.run_after(after, chunks)
        self._landed.append(landed)
        return result


@dataclasses.dataclass(frozen=True)
class InTurn:
    """A collective that waits for its turn; called as one that does not."""

    collective: Collective
    turns: Turns

    @property
    def schedule(self) -> Schedule:
        """The rounds."""
        return self.collective.schedule

    def __call__(self, chunks: jax.Array) -> jax.Array:
        """Runs on `[chunks, length]`, as a `Collective`."""
        return self.turns.run(self.collective, chunks)
