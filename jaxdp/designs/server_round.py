"""One step of a `ParameterServer`, as every device runs it.

An average is made in three moves: the devices of a worker reduce-scatter among
themselves (on a mesh with two axes), workers push to servers, servers aggregate. It is
applied by the server, and its part of the parameters pulled; or pulled and applied by
everybody.

In flight are the gradients of the last step, not pushed yet (`pending`), and averages
that wait at the servers (`queue`). Gradient number i since nothing was in flight waits
in slot i modulo s, the bound on staleness.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp import guard, serving
from jaxdp.buckets import is_summable
from jaxdp.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from jaxdp.designs.base import AxisName, PyTree, Update, Updated
from jaxdp.executor import accumulation_dtype
from jaxdp.loss import Contribution, Mean, divided

if TYPE_CHECKING:
    from jaxdp.designs.parameter_server import ParameterServer


class Served(NamedTuple):
    """What a train state keeps for a `ParameterServer` besides parameters.

    Attributes:
        opt_state: Of the part that each server updates, `[N, ...]`, entry r on device
            r; of the whole tree if workers update.
        refused: `[W]`, int32, pushes refused so far, by worker.
        pending: Gradients and weight of the last step, `[N, ...]`; None if synchronous.
        queue: Averages that wait at the servers, `[N, s, ...]`.
        since: `[]`, int32, gradients computed since nothing was in flight.
    """

    opt_state: PyTree
    refused: jax.Array
    pending: Any = None
    queue: Any = None
    since: Any = None


class ServerRound:
    """The moves of a design over its axes, inside `shard_map`."""

    def __init__(self, design: "ParameterServer", update: Update, axis_name: AxisName):
        """Looks up the axes: workers, and devices of a worker if there are two."""
        axes = (axis_name,) if isinstance(axis_name, str) else axis_name
        self.design, self.update = design, update
        self.axis_name, self.inner = axes[0], axes[1] if axes[1:] else None
        self.bound = design.max_staleness
        self.servers, self.updates_here = design.servers, design.update_on == "server"
        self.devices = lax.axis_size(self.axis_name)
        self.inner_size = lax.axis_size(self.inner) if self.inner else 1
        self.worker = lax.axis_index(self.axis_name) - design.serving_ranks

    def synchronous(
        self, contribution: Contribution, params: PyTree, served: Served
    ) -> Updated:
        """Push, aggregate, update, pull."""
        local, rest = self._accepted(contribution)
        mean, rest = self._average(local, rest)
        target, opt_state = self._target(params, served.opt_state)
        if self.updates_here:
            target, opt_state = self._apply(mean, True, target, opt_state)
            target, rest = self._pull((target, rest))
            params = self._join(target, params)
        else:
            mean, rest = self._pull((mean, rest))
            mean = self._whole(mean, params)
            params, opt_state = self._apply(mean, True, params, opt_state)
        results, refused = self._results(rest, served.refused)
        return Updated(params, Served(self._kept(opt_state), refused), results)

    def delayed(
        self, contribution: Contribution, params: PyTree, served: Served
    ) -> Updated:
        """Pushes what the last step left; its own gradients stay for the next."""
        local, rest = self._accepted(contribution)
        queue = self._queued(served)
        given = params, served.opt_state, queue, served.since
        if self.design.policy == "sliding":
            params, opt_state = self._slide(*given)
            since = served.since + 1
        else:
            closes = served.since == self.bound
            close = functools.partial(self._close, local)
            params, opt_state = lax.cond(closes, close, lambda *kept: kept[:2], *given)
            since = jnp.where(closes, 0, served.since + 1)
        rest = self._pull(self._push(self._inside(rest)))
        results, refused = self._results(rest, served.refused)
        pending, queue = jax.tree.map(lambda x: x[None], (local, queue))
        served = Served(opt_state, refused, pending, queue, since)
        return Updated(params, served, results)

    def flush(self, params: PyTree, served: Served) -> tuple[PyTree, Served]:
        """Applies what is in flight, the oldest first."""
        queue, since = self._queued(served), served.since
        target, opt_state = self._target(params, served.opt_state)
        oldest = jnp.maximum(since - self.bound, 0)
        for i in range(self.bound):
            target, opt_state = self._apply_number(
                oldest + i, oldest + i < since, queue, target, opt_state
            )
        opt_state = self._kept(opt_state)
        since = jnp.zeros_like(since)
        params = self._finished(target, params)
        return params, served._replace(opt_state=opt_state, since=since)

    def _slide(self, params, opt_state, queue, since) -> tuple[PyTree, PyTree]:
        """Applies the gradient that is as old as the bound allows, if there is one."""
        target, opt_state = self._target(params, opt_state)
        number = since - self.bound
        target, opt_state = self._apply_number(
            number, number >= 0, queue, target, opt_state
        )
        return self._finished(target, params), self._kept(opt_state)

    def _close(self, local, params, opt_state, queue, since) -> tuple[PyTree, PyTree]:
        """Ends a window: applies what waits, then the gradient of this step."""
        del since
        target, opt_state = self._target(params, opt_state)
        for number in range(self.bound):
            target, opt_state = self._apply_number(
                number, True, queue, target, opt_state
            )
        mean = self._arrived(self._average(local)[0], target)
        target, opt_state = self._apply(mean, True, target, opt_state, self.bound)
        return self._finished(target, params), self._kept(opt_state)

    def _queued(self, served: Served) -> Mean:
        """The queue, with what was pending at its end. It waits for no gradient."""
        pending, queue = jax.tree.map(lambda x: x[0], (served.pending, served.queue))
        fresh, _ = self._average(pending)
        slot = (served.since - 1) % self.bound
        return jax.tree.map(
            lambda slots, new: lax.dynamic_update_index_in_dim(slots, new, slot, 0),
            queue,
            fresh,
        )

    def _apply_number(self, number, valid, queue, target, opt_state):
        """Applies gradient `number` since nothing was in flight."""
        mean = jax.tree.map(
            lambda slots: lax.dynamic_index_in_dim(
                slots, number % self.bound, 0, keepdims=False
            ),
            queue,
        )
        staleness = jnp.minimum(number, self.bound)  # the first ones are not that old
        mean = self._arrived(mean, target)
        return self._apply(mean, valid, target, opt_state, staleness)

    def _apply(self, mean: Mean, valid, target, opt_state, staleness=0):
        """Updates the target, where and if there is something to apply."""
        goes = valid & (mean.weight > 0)
        if self.updates_here:
            goes &= lax.axis_index(self.axis_name) < self.servers

        def update(target, opt_state):
            return self.update.apply(mean, target, opt_state, staleness)

        return lax.cond(goes, update, lambda *kept: kept, target, opt_state)

    def _accepted(self, contribution: Contribution) -> tuple[Mean, PyTree]:
        """Gradients and weight, zero if they are refused, and all else that travels."""
        checked = jax.tree.leaves((contribution.gradients, contribution.loss.total))
        finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in checked]))
        if self.inner:  # one device's NaN refuses the push of its worker
            finite = lax.pmin(finite.astype(jnp.int32), self.inner) > 0

        def kept(x):
            return jnp.where(finite, x, jnp.zeros_like(x))

        def weighted(leaf):
            if not isinstance(leaf, Mean):
                return leaf
            one = jnp.ones((), accumulation_dtype(leaf.total.dtype))
            weight = one if leaf.weight is None else leaf.weight
            return Mean(kept(leaf.total), kept(weight))

        rest = jax.tree.map(
            weighted, contribution[1:], is_leaf=lambda leaf: isinstance(leaf, Mean)
        )
        workers = jnp.arange(self.devices - self.design.serving_ranks)
        refused = jnp.where(finite, 0.0, workers == self.worker)
        gradients = jax.tree.map(kept, contribution.gradients)
        weight = rest[0].weight.astype(jnp.result_type(float))
        return Mean(gradients, weight), (self._from_workers(rest), refused)

    def _from_workers(self, tree: PyTree) -> PyTree:
        """Leaves that no push averages, which dedicated servers have not computed."""
        if not self.design.serving_ranks:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        counts = [leaf for leaf in leaves if not is_summable(leaf)]
        root = self.design.serving_ranks
        sent = iter(broadcast(counts, self.axis_name, root))
        leaves = [leaf if is_summable(leaf) else next(sent) for leaf in leaves]
        return jax.tree.unflatten(structure, leaves)

    def _average(self, local: Mean, rest: PyTree = ()) -> tuple[Mean, PyTree]:
        """The aggregate of all workers' gradients, on the server of each part."""
        parts = self._scattered(local.total)
        weight, rest = self._inside((local.weight, rest))
        if self.design.aggregate == "sum":
            total, (weight, rest) = self._push((weight, rest), parts)
            return Mean(total, weight), rest

        def mean(total):
            safe = jnp.where(weight > 0, weight, 1)
            return jnp.where(weight > 0, divided(Mean(total, safe)), 0)

        means = jax.tree.map(mean, parts)
        apart = serving.collect(means, self.axis_name, *self._servers())
        total = guard.mark_aggregated(self.design.aggregate(apart))
        weight, rest = self._push((weight, rest))
        return Mean(total, jnp.sign(weight)), rest

    def _scattered(self, gradients: PyTree) -> PyTree:
        """`[S, ...]`: this worker's gradients, cut into parts; this device's share."""
        parts = serving.split(gradients, self.servers * self.inner_size)
        if self.inner is None:
            return parts
        shares = reduce_scatter(parts, self.inner, mean=True)
        return jax.tree.map(
            lambda share, part: share.reshape(self.servers, *part.shape[1:]),
            shares,
            parts,
        )

    def _inside(self, tree: PyTree) -> PyTree:
        """The average over the devices of this worker."""
        return all_reduce(tree, self.inner, mean=True) if self.inner else tree

    def _agreed(self, tree: PyTree) -> PyTree:
        """What all devices of a worker hold alike, in a form that proves it.

        It travelled in one buffer with shares of which each device has another.
        """
        return broadcast(tree, self.inner) if self.inner else tree

    def _push(self, rest: PyTree, parts: PyTree = ()) -> Any:
        """Averages on servers: each its part, and a copy of the rest."""
        copies = jax.tree.map(
            lambda x: (
                jnp.broadcast_to(x, (self.servers, *x.shape)) if is_summable(x) else x
            ),
            rest,
        )
        pushed = serving.push((parts, copies), self.axis_name, *self._servers())
        return pushed if parts != () else pushed[1]

    def _pull(self, tree: PyTree) -> PyTree:
        """`[S, ...]`: what the servers hold."""
        return serving.pull(tree, self.axis_name, self.devices, self.servers)

    def _servers(self) -> tuple[int, int, bool]:
        """Devices, servers, and whether those are dedicated."""
        return self.devices, self.servers, self.design.dedicated

    def _target(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """What an update applies to: on servers their part, on workers everything."""
        if not self.updates_here:
            return params, opt_state
        server = jnp.minimum(lax.axis_index(self.axis_name), self.servers - 1)
        share = lax.axis_index(self.inner) * self.servers if self.inner else 0
        parts = serving.split(params, self.servers * self.inner_size)
        own = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, share + server, keepdims=False), parts
        )
        return own, jax.tree.map(lambda x: x[0], opt_state)

    def _kept(self, opt_state: PyTree) -> PyTree:
        """The optimizer state as the train state keeps it."""
        if not self.updates_here:
            return opt_state
        return jax.tree.map(lambda x: x[None], opt_state)

    def _arrived(self, mean: Mean, like: PyTree) -> Mean:
        """An average where it is applied: workers pull it."""
        return mean if self.updates_here else self._whole(self._pull(mean), like)

    def _whole(self, mean: Mean, like: PyTree) -> Mean:
        """A pulled average as a tree like the parameters."""
        return Mean(self._join(mean.total, like), self._agreed(mean.weight[0]))

    def _finished(self, target: PyTree, params: PyTree) -> PyTree:
        """The parameters after the updates: workers pull them."""
        if not self.updates_here:
            return target
        return self._join(self._pull(target), params)

    def _join(self, pulled: PyTree, like: PyTree) -> PyTree:
        """`[S, ...]` to whole leaves, on all devices of a worker."""
        if self.inner:
            pulled = all_gather(pulled, self.inner)
        return serving.joined(pulled, like)

    def _results(self, pulled: PyTree, refused: jax.Array) -> tuple[PyTree, jax.Array]:
        """Metrics and model state, and the count of refused pushes, by worker."""
        rest = jax.tree.map(lambda x: x[0] if is_summable(x) else x, pulled)
        rest, flags = self._agreed(rest)
        metrics, model_state = self.update.results(Contribution(None, *rest))
        now = (flags > 0).astype(jnp.int32)
        return ({**metrics, "refused_pushes": now}, model_state), refused + now
