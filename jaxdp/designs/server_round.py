"""One synchronous step of a `ParameterServer`, as every device runs it.

Gradients take three moves: the devices of a worker reduce-scatter among themselves (on
a mesh with two axes), workers push to servers, servers aggregate. What servers make of
them is applied there, and their part of the parameters pulled; or it is pulled, and
applied by everybody.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp import marks, serving
from jaxdp.buckets import is_summable
from jaxdp.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from jaxdp.designs.base import AxisName, PyTree
from jaxdp.designs.update import Results, Update, Updated
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
        in_flight: `jaxdp.designs.server_delay.InFlight`; None if synchronous.
    """

    opt_state: PyTree
    refused: Any
    in_flight: Any = None


class Rest(NamedTuple):
    """What travels beside gradients, to every server: `Mean`s, and who was refused."""

    loss: Mean
    metrics: dict[str, Mean]
    model_state: PyTree
    refused: Any  # [W]


class ServerRound:
    """The moves of a design over its axes, inside `shard_map`."""

    def __init__(self, design: "ParameterServer", update: Update, axis_name: AxisName):
        """Looks up the axes: workers, and devices of a worker if there are two."""
        self.axis_name, self.inner = axis_name, None
        if isinstance(axis_name, tuple):
            self.axis_name, self.inner = axis_name
        self.design, self.update = design, update
        self.servers, self.updates_here = design.servers, design.update_on == "server"
        self.devices = lax.axis_size(self.axis_name)
        self.inner_size = lax.axis_size(self.inner) if self.inner else 1
        self.worker = lax.axis_index(self.axis_name) - design.serving_ranks

    def step(
        self, contribution: Contribution, params: PyTree, served: Served
    ) -> Updated:
        """Push, aggregate, update, pull."""
        gradients, rest = self._accepted(contribution)
        total, rest = self._aggregated(gradients, rest)
        target, opt_state = self._target(params, served.opt_state)
        if self.updates_here:
            mean = Mean(total, self._weight(rest))
            target, opt_state = self._apply(mean, True, target, opt_state)
            target, rest = self._pull((target, rest))
            params, rest = self._join(target, params), self._first(rest)
        else:
            total, rest = self._pull((total, rest))
            rest = self._first(rest)
            mean = Mean(self._join(total, params), self._weight(rest))
            params, opt_state = self._apply(mean, True, params, opt_state)
        results, refused = self._results(rest, served.refused)
        return Updated(params, Served(self._kept(opt_state), refused), results)

    def _accepted(self, contribution: Contribution) -> tuple[PyTree, Rest]:
        """Gradients as they are pushed, and all else; zeros if they are refused."""
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

        gradients, loss = contribution.gradients, contribution.loss
        metrics, model_state = contribution.metrics, contribution.model_state
        if callable(self.design.aggregate):
            gradients = self._worker_mean(gradients, loss.weight)
        loss, metrics, model_state = jax.tree.map(
            weighted,
            (loss, metrics, self._from_workers(model_state)),
            is_leaf=lambda leaf: isinstance(leaf, Mean),
        )
        workers = jnp.arange(self.devices - self.design.serving_ranks)
        refused = jnp.where(finite, 0.0, workers == self.worker)
        rest = Rest(loss, metrics, model_state, refused)
        return jax.tree.map(kept, gradients), rest

    def _worker_mean(self, gradients: PyTree, weight: Any) -> PyTree:
        """The gradient of this worker's own mean loss; zero if it has no weight."""
        if weight is None:
            return gradients
        weight = self._inside(weight)
        safe = jnp.where(weight > 0, weight, 1)
        return jax.tree.map(
            lambda g: jnp.where(weight > 0, divided(Mean(g, safe)), 0), gradients
        )

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

    def _apply(self, mean: Mean, valid, target, opt_state, staleness: Any = 0):
        """Updates the target, where and if there is something to apply."""
        goes = valid & (mean.weight > 0)
        if self.updates_here:
            goes &= lax.axis_index(self.axis_name) < self.servers

        def update(target, opt_state):
            return self.update.apply(mean, target, opt_state, staleness)

        return lax.cond(goes, update, lambda *kept: kept, target, opt_state)

    def _weight(self, rest: Rest) -> jax.Array:
        """The weight of an average; an aggregate has divided by it already."""
        weight = rest.loss.weight
        return jnp.sign(weight) if callable(self.design.aggregate) else weight

    def _aggregated(self, gradients: PyTree, rest: Rest) -> tuple[PyTree, Rest]:
        """What the servers make of all gradients, each its part; and of the rest."""
        parts, rest = self._scattered(gradients), self._inside(rest)
        if callable(self.design.aggregate):
            return self._made_of(parts), self._push(self._copies(rest))
        return self._push((parts, self._copies(rest)))

    def _made_of(self, parts: PyTree) -> PyTree:
        """What this server makes of its part of all workers' gradients alone."""
        aggregate = self.design.aggregate
        if not callable(aggregate):
            return self._push(parts)
        apart = serving.collect(parts, self.axis_name, *self._servers())
        return marks.aggregated(aggregate(apart), self.axis_name)

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

    def _copies(self, rest: PyTree) -> PyTree:
        """`[S, ...]`: the same for every server."""
        return jax.tree.map(
            lambda x: (
                jnp.broadcast_to(x, (self.servers, *x.shape)) if is_summable(x) else x
            ),
            rest,
        )

    def _push(self, tree: PyTree) -> Any:
        """Averages on servers, of `[S, ...]` each its entry."""
        return serving.push(tree, self.axis_name, *self._servers())

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

    def _first(self, pulled: PyTree) -> PyTree:
        """Of copies from all servers the first, in a form that proves it alike.

        On a mesh with two axes it travelled with shares of which each device has
        another.
        """
        rest = jax.tree.map(lambda x: x[0] if is_summable(x) else x, pulled)
        return broadcast(rest, self.inner) if self.inner else rest

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

    def _results(self, rest: Rest, refused: jax.Array) -> tuple[Results, jax.Array]:
        """Metrics and model state, and the count of refused pushes, by worker."""
        mean = Contribution(None, rest.loss, rest.metrics, rest.model_state)
        results = self.update.results(mean)
        now = (rest.refused > 0).astype(jnp.int32)
        metrics = {**results.metrics, "refused_pushes": now}
        return results._replace(metrics=metrics), refused + now
