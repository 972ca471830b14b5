"""The program of one device: its contribution, the exchange, the update."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxdp.backward import read_gradients
from jaxdp.collectives import broadcast
from jaxdp.contribution import Inputs, LocalLoss
from jaxdp.designs.base import AxisName, Design
from jaxdp.designs.update import Update
from jaxdp.gradient import GradientProgram
from jaxdp.loss import Contribution, Mean
from jaxdp.loss_scale import next_loss_scale
from jaxdp.state import TrainState
from jaxdp.trees import where

PyTree = Any


class Replica(NamedTuple):
    """What every device runs, inside `shard_map` over `axis_name`."""

    loss: LocalLoss
    optimizer: optax.GradientTransformation
    design: Design
    axis_name: AxisName

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name

    def step(self, state: TrainState, batch: PyTree):
        """One optimizer update, from this device's rows."""
        given = self._inputs(state, batch)
        with jax.named_scope("loss"):
            contribution, model_state = self._contribution(given, self._through())
        scaled = given.scale is not None
        update = Update(self.optimizer, given.model_state, state.step, scaled)
        with jax.named_scope("exchange"):
            params, opt_state, results = self.design.exchange(
                contribution, state.params, state.opt_state, update, self.axis_name
            )
        if self.loss.policy == "mean":
            model_state = results.model_state
        elif model_state is not None:
            model_state = self._agreed(model_state)
        if model_state is None:
            model_state = given.model_state
        new = TrainState(
            state.step + 1,
            *(params, opt_state, state.rng, model_state),
            *(state.loss_scale, self.design),
        )
        new, metrics = self._unless_skipped(given, state, new, results)
        return dataclasses.replace(
            new, model_state=self._kept(new.model_state)
        ), metrics

    def flush(self, state: TrainState) -> TrainState:
        """Applies the gradients still in flight."""
        update = Update(self.optimizer)
        params, opt_state = self.design.flush(
            state.params, state.opt_state, update, self.axis_name
        )
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    def contribution(self, state: TrainState, batch: PyTree) -> Contribution:
        """What this device adds to a step, with gradients that are whole."""
        through = self._through().unreduced()
        return self._contribution(self._inputs(state, batch), through)[0]

    def gradients_only(self, params: PyTree) -> Contribution:
        """Shapes of the gradients that travel, as if the last were ready first."""
        leaves, structure = jax.tree.flatten(params)
        read = [True] * len(leaves)
        if self.design.prunes:
            read = read_gradients(self.optimizer, params)
        kept = [leaf if r else None for leaf, r in zip(leaves, read, strict=True)]
        ready = tuple(range(sum(read), 0, -1))
        return Contribution(
            structure.unflatten(kept), Mean(None, None), {}, None, ready
        )

    def total(self, state: TrainState, batch: PyTree) -> Any:
        """What this device's loss adds up to, in its first micro-batch; to be traced.

        Parameters that are not here as arrays are zeros.
        """
        given = self._inputs(state, batch)
        first = jax.tree.map(lambda x: x[0], self.loss.slices(given.batch))
        params = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if _is_shape(x) else x,
            self._through().traced(given.params),
        )
        return self.loss(given._replace(params=params, batch=first))[0]

    def _inputs(self, state: TrainState, batch: PyTree) -> Inputs:
        """What this device's loss is computed from."""
        rng, model_state = state.rng, state.model_state
        if rng is not None:
            step = state.step
            if state.loss_scale is not None:  # a skipped step has used its numbers
                step = step + state.loss_scale.skipped
            rng = jax.random.fold_in(rng, step)
            rng = jax.random.fold_in(rng, lax.axis_index(self.axis_name))
        if self.loss.policy == "per_replica":
            model_state = jax.tree.map(lambda x: x[0], model_state)
        scale = None if state.loss_scale is None else state.loss_scale.scale
        params = self.design.local_params(state.params, self.axis_name)
        return Inputs(params, batch, rng, model_state, scale)

    def _through(self) -> GradientProgram:
        """How the program of the gradient is run."""
        return self.design.program(self.axis_name, self.loss.precision)

    def _contribution(
        self, given: Inputs, through: GradientProgram
    ) -> tuple[Contribution, PyTree]:
        """What this device adds to the step; zeros if it only serves."""
        shapes = self.design.local_shapes(given.params)
        needed = [True] * len(jax.tree.leaves(shapes))
        if self.design.prunes:
            needed = read_gradients(self.optimizer, shapes)

        def compute():
            return self.loss.contribution(given, needed, through)

        if not self.design.serving_ranks:
            return compute()

        def nothing():
            def zeros(leaf):
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), leaf)

            shapes, kept = jax.eval_shape(compute)
            pairs = shapes.model_state
            if pairs is not None:
                pairs = jax.tree.map(
                    lambda old, new: zeros(new) if isinstance(new, Mean) else old,
                    *(given.model_state, pairs),
                )
            rest = zeros(dataclasses.replace(shapes, model_state=None))
            kept = None if kept is None else given.model_state
            return dataclasses.replace(rest, model_state=pairs), kept

        works = lax.axis_index(self.axes[0]) >= self.design.serving_ranks
        return lax.cond(works, compute, nothing)

    def _agreed(self, model_state: PyTree) -> PyTree:
        """The first worker's, where replicas may differ and must not."""
        serves = self.design.serving_ranks
        if self.loss.policy == "per_replica" or not (self.loss.policy or serves):
            return model_state
        for axis_name, root in zip(self.axes, (serves, 0), strict=False):
            model_state = broadcast(model_state, axis_name, root)
        return model_state

    def _kept(self, model_state: PyTree) -> PyTree:
        """The model state as the train state keeps it."""
        if self.loss.policy != "per_replica":
            return model_state
        return jax.tree.map(lambda x: jnp.asarray(x)[None], model_state)

    def _unless_skipped(self, given: Inputs, old: TrainState, new: TrainState, results):
        """Keeps counters and model state where a loss scale skips the step."""
        metrics = results.metrics
        precision = self.loss.precision
        if old.loss_scale is None or precision is None:
            return new, metrics
        applied = results.nonfinite < 0
        attempt = old.step + old.loss_scale.skipped
        loss_scale = next_loss_scale(
            precision, old.loss_scale, results.nonfinite, attempt
        )
        kept = where(applied, new.model_state, given.model_state)
        metrics = metrics | {"loss_scale": given.scale, "skipped": ~applied}
        step = old.step + applied
        new = dataclasses.replace(
            new, step=step, model_state=kept, loss_scale=loss_scale
        )
        return new, metrics


def _is_shape(leaf: Any) -> bool:
    """Whether this stands for an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)
