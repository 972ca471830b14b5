"""What one replica contributes to a step: the gradient of its rows, loss and metrics.

The gradient is traced once, as a program: it tells when each gradient is ready and
which are zero whatever the batch (`jaxdp.backward`), and it is what runs, once, or once
per micro-batch in one `lax.scan`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxdp import marks, model_states
from jaxdp.backward import readiness, zeros
from jaxdp.data import PaddedBatch
from jaxdp.executor import accumulation_dtype
from jaxdp.gradient import GradientProgram, Leaving
from jaxdp.loss import Contribution, Mean, check_loss, split_loss, with_weight
from jaxdp.loss_scale import unscaled
from jaxdp.precision import Precision
from jaxdp.zero.shards import is_shard

PyTree = Any
LOSS = 0  # the number of the result that is differentiated


class Inputs(NamedTuple):
    """What a replica's loss is computed from.

    Attributes:
        params: The parameters that it is differentiated by.
        batch: Local rows, `[rows, ...]`.
        rng: Key of this step and replica, or None.
        model_state: As the step finds it, or None.
        scale: `[]`, what the loss is multiplied by before differentiation, or None.
    """

    params: PyTree
    batch: PyTree
    rng: Any = None
    model_state: PyTree = None
    scale: Any = None


class Micro(NamedTuple):
    """What the rows of one micro-batch give."""

    gradients: PyTree
    loss: Mean
    metrics: dict[str, Mean]
    model_state: PyTree


@dataclasses.dataclass(frozen=True)
class LocalLoss:
    """The loss function of a replica, and how it is called.

    Attributes:
        loss_fn: The user's.
        precision: What it computes in; None for as it comes.
        accumulate: Micro-batches per step.
        policy: What becomes of model states, as for `jaxdp.data_parallel`.
    """

    loss_fn: Callable[..., Any]
    precision: Precision | None = None
    accumulate: int = 1
    policy: str | None = None

    def __call__(self, given: Inputs) -> tuple[Any, tuple[Mean, dict, PyTree]]:
        """The total to differentiate; the loss, metrics, and next model state."""
        params, batch, arguments = given.params, given.batch, {}
        if given.rng is not None:
            arguments["rng"] = given.rng
        if given.model_state is not None:
            # Rebuilt: an nnx.State can only be changed in the trace that makes it.
            arguments["model_state"] = jax.tree.map(lambda x: x, given.model_state)
        if isinstance(batch, PaddedBatch):
            arguments["mask"], batch = batch.mask, batch.batch
        if self.precision is not None:
            params = self.precision.to_compute(params)
            if self.precision.cast_batch:
                batch = self.precision.to_compute(batch)
        loss, aux = split_loss(self.loss_fn(params, batch, **arguments))
        check_loss(loss, aux, arguments)
        total = loss.total
        if given.scale is not None:
            total = total.astype(accumulation_dtype(total.dtype)) * given.scale
        metrics = (aux.metrics or {}).items()
        metrics = {name: with_weight(loss, value) for name, value in metrics}
        return total, (loss, metrics, aux.model_state)

    def contribution(
        self, given: Inputs, needed: Sequence[bool], through: GradientProgram
    ) -> tuple[Contribution, PyTree]:
        """The contribution of all local rows, and the model state after them.

        Args:
            given: The local rows, and what else the loss needs.
            needed: For each parameter, whether anything depends on its gradient.
            through: How the program of the gradient is run.

        Returns:
            The contribution; and the next model state, None if loss_fn returned none.

        Raises:
            ValueError: Rows that micro-batches do not divide.
        """
        slices = self.slices(given.batch)
        first = given._replace(batch=jax.tree.map(lambda x: x[0], slices))
        traced = _Traced.of(self._micro, first, needed, through)
        if self.accumulate == 1:
            result = traced(first)
            new = self._next(result, given.model_state)
        else:
            result = self._accumulated(traced, given, first, slices)
            new = result.model_state
        new = model_states.marked(self.policy, new)
        gradients = result.gradients
        if not through.reduces:
            gradients = marks.gradients(unscaled(gradients, given.scale))
        contribution = Contribution(
            gradients,
            result.loss,
            result.metrics,
            model_states.pairs(
                self.policy, functools.partial(with_weight, result.loss), new, new
            ),
        )
        at = traced.ready
        pairs = model_states.pairs(
            self.policy, lambda time: Mean(time, at.loss.weight), at.model_state, new
        )
        ready = jax.tree.leaves((at.gradients, at.loss, at.metrics, pairs))
        return dataclasses.replace(contribution, ready=tuple(ready)), new

    def slices(self, batch: PyTree) -> PyTree:
        """Micro-batches: leaves `[rows, ...]` become `[accumulate, rows / k, ...]`."""
        rows = jax.tree.leaves(batch)[0].shape[0]
        if rows % self.accumulate:
            raise ValueError(indivisible(rows, self.accumulate))
        size = rows // self.accumulate
        return jax.tree.map(
            lambda x: x.reshape(self.accumulate, size, *x.shape[1:]), batch
        )

    def _next(self, micro: Micro, old: PyTree) -> PyTree:
        """The model state after a micro-batch; None if loss_fn returned none."""
        if micro.model_state is None:
            return None
        weight = micro.loss.weight
        return model_states.after(self.policy, micro.model_state, old, weight)

    def _micro(self, given: Inputs) -> tuple[jax.Array, Micro]:
        """One micro-batch, and what it was differentiated by."""

        def loss(params):
            return self(given._replace(params=params))

        (total, rest), gradients = jax.value_and_grad(loss, has_aux=True)(given.params)
        if self.precision is not None:
            gradients = self.precision.to_params(gradients)
        return total, Micro(gradients, *rest)

    def _accumulated(
        self, traced: "_Traced", given: Inputs, first: Inputs, slices: PyTree
    ) -> Micro:
        """All micro-batches, one after the other; `first` is given to the first."""

        def add(carry, numbered):
            (sums, model_state), (i, batch) = carry, numbered
            rng = None if given.rng is None else jax.random.fold_in(given.rng, i)
            micro = traced(
                given._replace(batch=batch, rng=rng, model_state=model_state)
            )
            sums = jax.tree.map(
                lambda total, x: total + x.astype(total.dtype), sums, micro[:3]
            )
            kept = self._next(micro, model_state)
            return (sums, model_state if kept is None else kept), None

        shapes = jax.eval_shape(traced, first)
        start = jax.tree.map(
            lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), shapes[:3]
        )
        numbered = (jnp.arange(self.accumulate), slices)
        (sums, model_state), _ = lax.scan(add, (start, given.model_state), numbered)
        return self._mean_of(sums, model_state, shapes)

    def _mean_of(self, sums: tuple, model_state: PyTree, like: Micro) -> Micro:
        """Sums over micro-batches; the mean of what carries no weight."""
        gradients, loss, metrics = sums
        count = self.accumulate if loss.weight is None else 1

        def mean(pair):
            return pair if pair.weight is not None else Mean(pair.total / count, None)

        result = Micro(
            jax.tree.map(lambda x: x / count, gradients),
            *jax.tree.map(mean, (loss, metrics), is_leaf=lambda x: isinstance(x, Mean)),
            model_state=None,
        )
        result = jax.tree.map(
            lambda x, shape: x.astype(shape.dtype),
            result,
            like._replace(model_state=None),
        )
        if like.model_state is None:
            return result
        return result._replace(model_state=model_state)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """The program of one micro-batch.

    Attributes:
        program: From the leaves of `Inputs` to those of `results`.
        results: The structure of its results.
        ready: When each result of a call is ready.
        keep: For each parameter, whether its gradient is a result.
        through: How it is run.
    """

    program: ClosedJaxpr
    results: Any
    ready: Micro
    keep: tuple[bool, ...]
    through: GradientProgram

    @classmethod
    def of(
        cls,
        micro: Callable[[Inputs], tuple[jax.Array, Micro]],
        given: Inputs,
        needed: Sequence[bool],
        through: GradientProgram,
    ) -> "_Traced":
        """Traces it, and leaves out gradients that are zero or not needed."""
        given = given._replace(params=through.traced(given.params))
        program, shapes = jax.make_jaxpr(micro, return_shape=True)(given)
        results = jax.tree.structure(shapes)
        zero = zeros(program)[1 : len(needed) + 1]
        keep = tuple(n and not z for n, z in zip(needed, zero, strict=True))
        _, times = results.unflatten(readiness(program))
        return cls(program, results, _pruned(times, keep), keep, through)

    def __call__(self, given: Inputs) -> Micro:
        """Runs it."""
        arguments = jax.tree.leaves(given, is_leaf=is_shard)
        leaving = self._leaving(given.scale)
        found = self.through.run(self.program, arguments, LOSS, leaving)
        _, micro = self.results.unflatten(found)
        micro = _pruned(micro, self.keep)
        return micro._replace(gradients=self.through.reduced(micro.gradients))

    def _leaving(self, scale: jax.Array | None) -> Leaving:
        """The gradients that travel, which are the first results after the loss."""
        _, micro = self.results.unflatten(range(self.results.num_leaves))
        named = jax.tree_util.tree_leaves_with_path(micro.gradients)
        names = {number: jax.tree_util.keystr(path) for path, number in named}
        kept = [number for number, keep in zip(names, self.keep, strict=True) if keep]

        def finished(number, gradient):
            return marks.gradient(unscaled(gradient, scale), names[number])

        ready = jax.tree.leaves(self.ready.gradients)
        return Leaving(names, kept, ready, finished)


def _pruned(micro: Micro, keep: Sequence[bool]) -> Micro:
    """Without the gradients that need not travel."""
    leaves, structure = jax.tree.flatten(micro.gradients, is_leaf=is_shard)
    kept = [x if k else None for x, k in zip(leaves, keep, strict=True)]
    return micro._replace(gradients=structure.unflatten(kept))


def indivisible(rows: int, accumulate: int) -> str:
    """The message for rows that micro-batches do not divide."""
    whole, rest = divmod(rows, accumulate)
    return (
        f"data_parallel got accumulate={accumulate} and a batch of {rows} rows per "
        f"device. Micro-batches are equal slices of them, and {rows} = {accumulate} x "
        f"{whole} + {rest}. Choose a divisor of {rows}, or pad with jaxdp.shard_batch("
        f"batch, mesh, remainder='pad', accumulate={accumulate})."
    )
