"""Steps on two streams, dispatched in an order in which communication hides.

Nothing here waits for a result but the end of a step, which waits for the last exchange
of the step before: so at most two steps are in flight.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxdp import guard
from jaxdp.contribution import LocalLoss
from jaxdp.data import shard_batch
from jaxdp.designs.bucketed import Bucketed
from jaxdp.designs.update import Update
from jaxdp.loss import Mean
from jaxdp.mesh import without_mesh
from jaxdp.processes.agreement import check_same_program
from jaxdp.replica import Replica
from jaxdp.state import TrainState, check_opt_state, check_state
from jaxdp.streams.meshes import Streams
from jaxdp.streams.plan import Plan, plan
from jaxdp.streams.programs import Exchange, Packed
from jaxdp.trainer import Trainer

PyTree = Any


class InFlight(NamedTuple):
    """The contribution of a step, exchanged but not applied.

    Attributes:
        mean: Its buckets.
        staleness: `[]`, int32: updates between its weights and its application.
    """

    mean: Packed
    staleness: Any


class Delayed(NamedTuple):
    """What a state keeps besides parameters if gradients are applied late.

    Attributes:
        opt_state: The optimizer state.
        in_flight: What the last step left; None if nothing is in flight.
    """

    opt_state: PyTree
    in_flight: InFlight | None


class StreamTrainer:
    """The functions of one training on two streams, and what they share."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        design: Bucketed,
        streams: Streams,
        delay: int,
    ):
        """Makes them; nothing compiles before it is called."""
        (axis_name,) = streams.compute.axis_names
        replica = Replica(LocalLoss(loss_fn), optimizer, design, axis_name)
        self.base = Trainer(replica, streams.compute)
        self.streams, self.delay = streams, delay
        self.update = Update(optimizer)
        self.exchange = Exchange(design, streams)
        self.plans: dict[Any, Plan] = {}
        same = self.base.replicated
        self.apply = jax.jit(
            self._apply, static_argnums=2, donate_argnums=0, out_shardings=same
        )
        self.metrics = jax.jit(
            lambda packed: self.update.results(packed.contribution()).metrics,
            out_shardings=same,
        )

    def init(
        self,
        params: PyTree,
        *,
        rng: jax.Array | None = None,
        model_state: PyTree = None,
    ) -> TrainState:
        """The state before the first step."""
        if model_state is not None:
            raise ValueError(
                "streams.data_parallel's init got a model_state. Its segments carry "
                "none: what becomes of it where replicas differ is a policy of "
                "jaxdp.data_parallel. Use that, or put the statistics into Aux metrics."
            )
        state = self.base.init(params, rng=rng)
        return self._kept(state, None) if self.delay else state

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict]:
        """One optimizer update."""
        state, flight = self._taken(state, "step")
        batch = shard_batch(batch, self.streams.compute)
        before = self.exchange.count
        state, metrics = without_mesh(self._dispatched)(state, flight, batch)
        if before is not None:
            jax.block_until_ready(before)
        return state, metrics

    def flush(self, state: TrainState) -> TrainState:
        """Applies the gradient still in flight."""
        state, flight = self._taken(state, "flush")
        if not self.delay:
            return state
        if flight is not None:
            state = without_mesh(self.apply)(state, flight, 0)
        return self._kept(state, None)

    def params(self, state: TrainState) -> PyTree:
        """A copy of the parameters, which later steps do not donate."""
        return self.base.params(self._taken(state, "params")[0])

    def lower(self, state: TrainState, batch: PyTree) -> dict[str, jax.stages.Lowered]:
        """All programs of a step by name."""
        state, _ = self._taken(state, "lower")
        batch = shard_batch(batch, self.streams.compute)
        return without_mesh(self._lowered)(state, batch)

    def _dispatched(self, state, flight, batch) -> tuple[TrainState, dict]:
        """Dispatches one step."""
        mean = self._plan(state, batch)(state, batch, self.exchange)
        metrics = self.metrics(mean)
        if not self.delay:
            return self.apply(state, InFlight(mean, np.int32(0)), 1), metrics
        following = InFlight(mean, np.int32(flight is not None))
        return self._kept(self.apply(state, flight, 1), following), metrics

    def _lowered(self, state, batch) -> dict[str, jax.stages.Lowered]:
        """The programs."""
        chosen = self._plan(state, batch)
        programs = chosen.lowered(state, batch, self.exchange)
        flight = InFlight(chosen.means(), np.int32(0))
        return programs | {"update": self.apply.lower(state, flight, 1)}

    def _plan(self, state: TrainState, batch: PyTree) -> Plan:
        """The plan for arrays of these types, made once."""
        leaves, structure = jax.tree.flatten((state, batch))
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self.plans:
            fresh = jax.eval_shape(self.base.jitted_init, state.params, None, None)
            check_opt_state(state.opt_state, fresh.opt_state)
            made = plan(self.base, self.streams, self.delay, state, batch)
            self._check_optimizer(state, made)
            if len(self.base.ranks) > 1:
                programs = made.lowered(state, batch, self.exchange).values()
                text = "\n".join(program.as_text() for program in programs)
                check_same_program(text, self.base.ranks)
            self.plans[key] = made
        return self.plans[key]

    def _apply(
        self, state: TrainState, flight: InFlight | None, steps: int
    ) -> TrainState:
        """The state with a contribution applied, and so many steps more done."""
        step = state.step + steps
        if flight is None:
            return dataclasses.replace(state, step=step)

        def body(params, opt_state, mean, staleness):
            mean = mean.contribution()
            gradients = Mean(mean.gradients, mean.loss.weight)
            return self.update.apply(gradients, params, opt_state, staleness)

        update = jax.shard_map(
            body,
            mesh=self.streams.compute,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,  # nothing communicates, which is checked
        )
        params, opt_state = update(state.params, state.opt_state, *flight)
        return dataclasses.replace(state, step=step, params=params, opt_state=opt_state)

    def _check_optimizer(self, state: TrainState, made: Plan) -> None:
        """Refuses an optimizer that communicates.

        Raises:
            ValueError: It does.
        """
        (axis_name,) = self.streams.compute.axis_names
        flight = InFlight(made.means(), np.int32(0))
        program = jax.make_jaxpr(self._apply, static_argnums=2)(state, flight, 1)
        if guard.talks_over(program, axis_name):
            raise ValueError(
                f"streams.data_parallel got an optimizer that communicates over axis "
                f"{axis_name!r}. It runs on the compute stream, on gradients that are "
                "averaged already. Drop jaxdp.synchronize_gradients from its chain."
            )

    def _taken(
        self, state: TrainState, caller: str
    ) -> tuple[TrainState, InFlight | None]:
        """Checks a state, and takes apart what a delay adds to it."""
        caller = f"train.{caller}"
        check_state(state, self.base.replica.design, self.base.replicated, caller)
        late = isinstance(state.opt_state, Delayed)
        if late != bool(self.delay):
            raise ValueError(
                f"{caller} got a state made with delay={int(late)}, and this "
                f"program has delay={self.delay}. Make the state with this program's "
                "init, from the train.params(state) of the other."
            )
        if not late:
            return state, None
        opt_state, flight = state.opt_state
        return dataclasses.replace(state, opt_state=opt_state), flight

    def _kept(self, state: TrainState, flight: InFlight | None) -> TrainState:
        """The state as a delay keeps it."""
        kept = Delayed(state.opt_state, flight)
        return dataclasses.replace(state, opt_state=kept)
