"""Parameter servers: workers push gradients, servers aggregate, workers pull.

Ranks 0 to S - 1 serve. One server holds everything; several own a part of every
parameter each (`jaxdp.serving`), aggregate and update it, and send it back. A server is
a worker too, unless it is dedicated: then it has no rows and computes no gradient.
Before and after a step every device holds all parameters; the optimizer state of a part
is true on its server alone.

With `max_staleness` s > 0 the state carries gradients in flight, and a step pushes what
the step before computed, while it computes its own:

    sliding   at step t the weights contain the gradients up to t - 1 - s
    window    s + 1 steps run on the same weights; then their gradients are applied as
              s + 1 successive updates

On a mesh with two axes a worker, or server, is a row of devices: they reduce-scatter
among themselves first, and each then pushes and pulls its share alone.

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
OSDI 2014, sections 2 and 3.4 (bounded delay); Ho et al., "More Effective Distributed ML
via a Stale Synchronous Parallel Parameter Server", NIPS 2013, section 3.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdp import separable, serving
from jaxdp.designs import server_delay, server_parts
from jaxdp.designs.base import Design, PyTree
from jaxdp.designs.portable import Portable
from jaxdp.designs.server_delay import DelayedRound, in_flight_spec, nothing_in_flight
from jaxdp.designs.server_round import Served, ServerRound


@dataclasses.dataclass(frozen=True)
class ParameterServer(Design):
    """Workers push gradients to servers and pull parameters, or averages, back.

    A push with a NaN or infinity is refused: it counts for nothing in this step.
    `metrics["refused_pushes"]`, `[W]` int32, says whose, and `state.opt_state.refused`
    how many so far.

    Cost: 2 rounds; each server receives (N - 1) K / S bytes for what it serves and
    sends as many. Loss and metrics ride along, to every server. With s > 0 loss and
    metrics take 2 small rounds of their own, and every device keeps K + s K / S bytes
    in flight. With a window the first step of each sends zeros, since a program cannot
    skip what it overlaps, and the last one pushes twice.

    Attributes:
        servers: S.
        dedicated: Whether servers do nothing else. The batch is split over the other
            ranks.
        update_on: "server": the optimizer runs on the server, on its part, and new
            parameters come back. "worker": averaged gradients come back, and every
            device runs the optimizer on all of them.
        aggregate: "sum": the gradient of the global mean loss. Or a function of a tree
            with leaves `[W, ...]`, the gradient of each worker's own mean loss (zeros
            if refused), that returns one without that axis: `jaxdp.aggregation`.
        max_staleness: s, how many updates a gradient may be late; 0 is synchronous. The
            optimizer is told how many it is, as `staleness=`.
        policy: "sliding" or "window"; see the module's docstring.
    """

    servers: int = 1
    dedicated: bool = False
    update_on: Literal["server", "worker"] = "server"
    aggregate: Literal["sum"] | Callable[[PyTree], PyTree] = "sum"
    max_staleness: int = 0
    policy: Literal["sliding", "window"] = "sliding"

    most_axes: ClassVar[int] = 2
    prunes: ClassVar[bool] = False  # servers cut whole trees into parts
    skips: ClassVar[bool] = False  # it refuses single pushes instead

    @property
    def serving_ranks(self):
        """Dedicated servers compute no gradient."""
        return self.servers if self.dedicated else 0

    def check(self, devices):
        """Checks the options."""
        most = devices - 1 if self.dedicated else devices
        if not 1 <= self.servers <= most:
            rest = f"{devices} - {self.servers} = {devices - self.servers}"
            why = f", and {rest} would be left to work" if self.dedicated else ""
            raise ValueError(
                f"ParameterServer got servers={self.servers} with dedicated="
                f"{self.dedicated} on {devices} ranks{why}. It needs at least 1 server "
                f"and 1 worker: from 1 to {most} servers. Use fewer servers, or more "
                "devices."
            )
        _choose("update_on", self.update_on, ("server", "worker"))
        _choose("policy", self.policy, ("sliding", "window"))
        if not callable(self.aggregate):
            _choose("aggregate", self.aggregate, ("sum",), " or a function")
        if self.max_staleness < 0 or not float(self.max_staleness).is_integer():
            raise ValueError(
                f"ParameterServer got max_staleness={self.max_staleness}. It is a "
                "number of updates, at least 0 (synchronous). For no bound at all, "
                "which one program cannot have, use jaxdp.asynchronous."
            )

    @jax.ensure_compile_time_eval()  # also where only shapes are wanted
    def check_training(self, optimizer, params, sizes):
        """Checks that aggregate and optimizer can run on the servers' parts."""
        parts = self.servers * math.prod(sizes[1:])
        workers = sizes[0] - self.serving_ranks
        part = f"{parts} parts ({self.servers} servers, each of {parts // self.servers}"
        where = f"{part} devices)"
        remedy = "Use one server"
        if callable(self.aggregate):
            separable.check_aggregate(self.aggregate, params, workers, parts)
        if callable(self.aggregate) and parts > 1:
            given = (self.aggregate, params, workers, parts)
            if why := separable.mixing_of_aggregate(*given):
                raise ValueError(
                    f"ParameterServer runs its aggregate on {where}, and {why}. On "
                    "parts it would give another result than on the whole tree. "
                    f"{remedy}."
                )
        if self.update_on == "server" and parts > 1:
            if why := separable.mixing_of_optimizer(optimizer, params, parts):
                raise ValueError(
                    f"ParameterServer runs the optimizer on {where}, and {why}. On "
                    "parts it would make another update than on the whole tree, as "
                    f"clip_by_global_norm would. {remedy}, or update_on='worker'."
                )

    def init_opt_state(self, optimizer, params, sizes):
        """Optimizer state by part, and nothing in flight."""
        devices, inner = math.prod(sizes), math.prod(sizes[1:])
        refused = jnp.zeros(sizes[0] - self.serving_ranks, jnp.int32)
        parts = serving.split(params, self.servers * inner)
        if self.update_on == "worker":
            opt_state = optimizer.init(params)
        else:
            owned = serving.owned_parts(devices, inner, self.servers)
            opt_state = jax.vmap(optimizer.init)(
                jax.tree.map(lambda leaf: leaf[owned], parts)
            )

        in_flight = None
        if self.max_staleness:
            part = jax.tree.map(lambda leaf: leaf[0], parts)
            in_flight = nothing_in_flight(params, part, devices, self.max_staleness)
        return Served(opt_state, refused, in_flight)

    def opt_state_spec(self, axis_name):
        """One part, and what is in flight there, per device."""
        opt_state = P(axis_name) if self.update_on == "server" else P()
        in_flight = in_flight_spec(axis_name) if self.max_staleness else None
        return Served(opt_state, P(), in_flight)

    def portable(self, params, opt_state):
        """The optimizer state in one, and what is in flight, if something is."""
        whole = opt_state.opt_state
        carried = {"refused_pushes": opt_state.refused}
        if self.update_on == "server":
            parts = server_parts.Parts.of(opt_state, self.servers, self.serving_ranks)
            whole = parts.joined(whole, params)
        if self.max_staleness and server_delay.may_be_in_flight(opt_state.in_flight):
            carried["in_flight"] = {self._delay(): opt_state.in_flight}
        return Portable(params, whole, carried)

    def kept(self, portable, params, opt_state):
        """The optimizer state by part; nothing in flight if nothing was."""
        own, carried = portable.opt_state, portable.carried
        if self.update_on == "server":
            parts = server_parts.Parts.of(opt_state, self.servers, self.serving_ranks)
            own = parts.cut(own, portable.params, opt_state.opt_state)
        refused = carried.get("refused_pushes", opt_state.refused)
        if refused.shape != opt_state.refused.shape:
            refused = opt_state.refused
        in_flight = opt_state.in_flight
        if "in_flight" in carried:
            in_flight = carried["in_flight"][self._delay()]
        return portable.params, Served(own, refused, in_flight)

    def _delay(self) -> str:
        """What gradients in flight depend on."""
        how = f"{self.policy}-{self.max_staleness}-of-{self.servers}"
        if self.dedicated:
            how += "-dedicated"
        if callable(self.aggregate):
            how += f"-{getattr(self.aggregate, '__name__', 'function')}"
        return how

    def exchange(self, contribution, params, opt_state, update, axis_name):
        """Pushes, aggregates, updates and pulls."""
        round_ = DelayedRound if self.max_staleness else ServerRound
        return round_(self, update, axis_name).step(contribution, params, opt_state)

    def flush(self, params, opt_state, update, axis_name):
        """Applies what is in flight, oldest first, each as an update of its own."""
        return DelayedRound(self, update, axis_name).flush(params, opt_state)


def _choose(name: str, given: Any, known: tuple[str, ...], more: str = "") -> None:
    """Refuses an option that is not known."""
    if given not in known:
        listed = " or ".join(map(repr, known))
        raise ValueError(
            f"ParameterServer got {name}={given!r}. It must be {listed}{more}. Leave "
            f"it out for {known[0]!r}."
        )
