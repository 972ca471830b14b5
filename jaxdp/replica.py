"""The program of one device: its gradient, the exchange, the update."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax import lax

from jaxdp import guard
from jaxdp.buckets import is_summable
from jaxdp.data import PaddedBatch
from jaxdp.designs.base import Design, Updated
from jaxdp.loss import (
    Contribution,
    Mean,
    check_loss,
    divided,
    split_loss,
    with_weight,
)
from jaxdp.state import TrainState

PyTree = Any


class Replica(NamedTuple):
    """What every device runs, inside `shard_map` over `axis_name`."""

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    design: Design
    axis_name: str

    def step(self, state: TrainState, batch: PyTree):
        """One optimizer update, from this device's rows."""
        loss = functools.partial(self.local_loss, state, batch)
        (_, rest), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        contribution = Contribution(guard.mark(gradients), *rest)
        params, opt_state, (metrics, model_state) = self.design.exchange(
            contribution, state.params, state.opt_state, self._update, self.axis_name
        )
        if model_state is None:
            model_state = state.model_state
        else:  # weights may have widened it
            model_state = jax.tree.map(
                lambda new, old: new.astype(old.dtype) if is_summable(new) else new,
                model_state,
                state.model_state,
            )
        state = TrainState(
            state.step + 1, params, opt_state, state.rng, model_state, self.design
        )
        return state, metrics

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

    def _update(self, mean: Contribution, params: PyTree, opt_state: PyTree) -> Updated:
        """The optimizer, on an averaged contribution."""
        weight = mean.loss.weight
        gradients = jax.tree.map(lambda g: divided(Mean(g, weight)), mean.gradients)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        results = jax.tree.map(
            lambda leaf: divided(leaf) if _is_mean(leaf) else leaf,
            ({"loss": mean.loss, **mean.metrics}, mean.model_state),
            is_leaf=_is_mean,
        )
        return Updated(params, opt_state, results)


def _is_mean(leaf: Any) -> bool:
    """A Mean is a leaf."""
    return isinstance(leaf, Mean)
