"""Bounded delay: the steps of a `ParameterServer` whose gradients are in flight.

A step pushes what the step before left, while it computes; neither waits for the other.
Only loss and metrics of a step travel in the step itself, since callers want them, and
with them the weight of its gradients: so nothing that moves gradients waits for this
step's loss, not even through a condition.

Gradient number i since nothing was in flight waits in slot i modulo s of the queue, its
weight in slot i modulo s + 1, where s is the bound on staleness.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from jaxdp.designs.base import PyTree
from jaxdp.designs.server_round import Served, ServerRound
from jaxdp.designs.update import Updated
from jaxdp.loss import Contribution, Mean


class InFlight(NamedTuple):
    """Gradients between their step and their update.

    Attributes:
        pending: Those of the last step, `[N, ...]`, entry r on device r, not pushed.
        queue: What servers made of older ones, `[N, s, ...]`.
        weights: `[s + 1]`, of all of them.
        since: `[]`, int32, gradients computed since nothing was in flight.
    """

    pending: PyTree
    queue: PyTree
    weights: Any
    since: Any


def nothing_in_flight(
    params: PyTree, part: PyTree, devices: int, bound: int
) -> InFlight:
    """The state before the first step; `part` is what one server owns."""

    def zeros(tree, *shape):
        return jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape), x.dtype), tree)

    weights = jnp.zeros(bound + 1, jnp.result_type(float))
    return InFlight(
        zeros(params, devices),
        zeros(part, devices, bound),
        weights,
        jnp.zeros((), jnp.int32),
    )


def in_flight_spec(axis_name: Any) -> InFlight:
    """How it lies on the mesh."""
    return InFlight(P(axis_name), P(axis_name), P(), P())


def may_be_in_flight(flight: InFlight) -> bool:
    """Whether gradients wait for their update; yes where only shapes are known."""
    return isinstance(flight.since, Tracer) or int(flight.since) > 0


class DelayedRound(ServerRound):
    """The moves of a step with gradients in flight."""

    def step(
        self, contribution: Contribution, params: PyTree, served: Served
    ) -> Updated:
        """Pushes what the last step left; its own gradients stay for the next."""
        gradients, rest = self._accepted(contribution)
        rest = self._push(self._copies(self._inside(rest)))
        rest = self._first(self._pull(rest))
        flight = self._queued(served.in_flight)
        since, bound = flight.since, self.design.max_staleness
        if self.design.policy == "sliding":
            params, opt_state = self._slide(flight, params, served.opt_state)
            following = since + 1
        else:
            closes = since == bound

            def close(params, opt_state):
                return self._close(flight, gradients, rest, params, opt_state)

            params, opt_state = lax.cond(
                closes, close, lambda *kept: kept, params, served.opt_state
            )
            following = jnp.where(closes, 0, since + 1)
        results, refused = self._results(rest, served.refused)
        pending, queue = jax.tree.map(lambda x: x[None], (gradients, flight.queue))
        weights = flight.weights.at[since % (bound + 1)].set(self._weight(rest))
        flight = InFlight(pending, queue, weights, following)
        return Updated(params, Served(opt_state, refused, flight), results)

    def flush(self, params: PyTree, served: Served) -> tuple[PyTree, Served]:
        """Applies what is in flight, the oldest first."""
        flight, bound = self._queued(served.in_flight), self.design.max_staleness
        target, opt_state = self._target(params, served.opt_state)
        oldest = jnp.maximum(flight.since - bound, 0)
        for i in range(bound):
            number = oldest + i
            given = number, number < flight.since, target, opt_state
            target, opt_state = self._apply_number(flight, *given)
        left = served.in_flight._replace(since=jnp.zeros_like(flight.since))
        served = Served(self._kept(opt_state), served.refused, left)
        return self._finished(target, params), served

    def _slide(self, flight, params, opt_state) -> tuple[PyTree, PyTree]:
        """Applies the gradient that is as old as the bound allows, if there is one."""
        target, opt_state = self._target(params, opt_state)
        number = flight.since - self.design.max_staleness
        target, opt_state = self._apply_number(
            flight, number, number >= 0, target, opt_state
        )
        return self._finished(target, params), self._kept(opt_state)

    def _close(self, flight, gradients, rest, params, opt_state):
        """Ends a window: applies what waits, then the gradient of this step."""
        bound = self.design.max_staleness
        target, opt_state = self._target(params, opt_state)
        for number in range(bound):
            target, opt_state = self._apply_number(
                flight, number, True, target, opt_state
            )
        total = self._arrived(self._made_of(self._scattered(gradients)), target)
        mean = Mean(total, self._weight(rest))
        target, opt_state = self._apply(mean, True, target, opt_state, bound)
        return self._finished(target, params), self._kept(opt_state)

    def _queued(self, flight: InFlight) -> InFlight:
        """Pushes what is pending to the end of the queue."""
        pending, queue = jax.tree.map(lambda x: x[0], (flight.pending, flight.queue))
        slot = (flight.since - 1) % self.design.max_staleness
        queue = jax.tree.map(
            lambda slots, new: lax.dynamic_update_index_in_dim(slots, new, slot, 0),
            *(queue, self._made_of(self._scattered(pending))),
        )
        return flight._replace(queue=queue)

    def _apply_number(self, flight, number, valid, target, opt_state):
        """Applies gradient `number` since nothing was in flight."""
        bound = self.design.max_staleness
        total = jax.tree.map(
            lambda slots: lax.dynamic_index_in_dim(slots, number % bound, 0, False),
            flight.queue,
        )
        mean = Mean(self._arrived(total, target), flight.weights[number % (bound + 1)])
        staleness = jnp.minimum(number, bound)  # the first ones are not that old
        return self._apply(mean, valid, target, opt_state, staleness)

    def _arrived(self, total: PyTree, like: PyTree) -> PyTree:
        """An average where it is applied: workers pull it."""
        return total if self.updates_here else self._join(self._pull(total), like)
