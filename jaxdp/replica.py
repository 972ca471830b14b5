"""The program of one device: its gradient, the exchange, the update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxdp import guard
from jaxdp.buckets import is_summable
from jaxdp.data import PaddedBatch
from jaxdp.designs.base import AxisName, Design, Update
from jaxdp.loss import Contribution, Mean, check_loss, split_loss, with_weight
from jaxdp.state import TrainState

PyTree = Any


class Replica(NamedTuple):
    """What every device runs, inside `shard_map` over `axis_name`."""

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    design: Design
    axis_name: AxisName

    def step(self, state: TrainState, batch: PyTree):
        """One optimizer update, from this device's rows."""
        update = Update(self.optimizer, state.model_state)
        params, opt_state, (metrics, model_state) = self.design.exchange(
            self._contribution(state, batch),
            *(state.params, state.opt_state, update, self.axis_name),
        )
        if model_state is None:
            model_state = state.model_state
        state = TrainState(
            state.step + 1, params, opt_state, state.rng, model_state, self.design
        )
        return state, metrics

    def flush(self, state: TrainState) -> TrainState:
        """Applies the gradients still in flight."""
        update = Update(self.optimizer)
        params, opt_state = self.design.flush(
            state.params, state.opt_state, update, self.axis_name
        )
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    def _contribution(self, state: TrainState, batch: PyTree) -> Contribution:
        """What this device adds to the step; zeros if it only serves."""

        def compute() -> Contribution:
            loss = functools.partial(self.local_loss, state, batch)
            (_, rest), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
            return Contribution(guard.mark(gradients), *rest)

        if not self.design.serving_ranks:
            return compute()

        def nothing() -> Contribution:
            def zeros(leaf):
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), leaf)

            shapes = jax.eval_shape(compute)
            model_state = shapes.model_state
            if model_state is not None:
                model_state = jax.tree.map(
                    lambda old, new: zeros(new) if isinstance(new, Mean) else old,
                    *(state.model_state, model_state),
                )
            return zeros(shapes._replace(model_state=None))._replace(
                model_state=model_state
            )

        axis_name = self.axis_name
        first = axis_name if isinstance(axis_name, str) else axis_name[0]
        works = lax.axis_index(first) >= self.design.serving_ranks
        return lax.cond(works, compute, nothing)

    def local_loss(self, state: TrainState, batch: PyTree, params: PyTree):
        """The total to differentiate, and the pairs to average."""
        arguments = {}
        if state.rng is not None:
            rank = lax.axis_index(self.axis_name)
            step_key = jax.random.fold_in(state.rng, state.step)
            arguments["rng"] = jax.random.fold_in(step_key, rank)
        if state.model_state is not None:
            arguments["model_state"] = state.model_state
        if isinstance(batch, PaddedBatch):
            arguments["mask"], batch = batch.mask, batch.batch
        loss, aux = split_loss(self.loss_fn(params, batch, **arguments))
        check_loss(loss, aux, arguments)
        weighted = functools.partial(with_weight, loss)
        metrics = {name: weighted(value) for name, value in (aux.metrics or {}).items()}
        model_state = jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                weighted(leaf)
                if is_summable(leaf)
                else guard.mark_alike(leaf, f"model_state{jax.tree_util.keystr(path)}")
            ),
            aux.model_state,
        )
        return loss.total, (loss, metrics, model_state)
