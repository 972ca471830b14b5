"""The training step of `nn.DataParallel`, stage by stage.

    1  inputs are checked, targets go to the output device        host
    2  parameters and buffers to all devices                      N - 1 copies
    3  a slice of the batch to each device                        every row once
    4  forward, side by side
    5  outputs to the output device                               every output once
    6  loss there, and its gradient with respect to the outputs
    7  that gradient back to the replicas, then backward, side by side
    8  gradients to the root, summed there, optimizer there       N - 1 gradients

Parameters go out again at stage 2 of the next step; stage 3 comes before it, since the
number of slices decides how many copies are needed. Both as in PyTorch.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.buckets import is_summable
from jaxdp.loss import Aux, Mean, divided, split_loss, with_weight
from jaxdp.mesh import without_mesh
from jaxdp.replicated import functional, observe, replicas, transfers
from jaxdp.replicated.devices import name
from jaxdp.replicated.inputs import check_arrays
from jaxdp.replicated.moves import Replicate
from jaxdp.replicated.transfers import is_on
from jaxdp.state import check_params, is_deleted, own_copy

if TYPE_CHECKING:
    from jaxdp.replicated.model import DataParallel

PyTree = Any
Arrays = list[Any]


class State(NamedTuple):
    """What a run carries from step to step, all of it on the root.

    Attributes:
        params: The parameters.
        opt_state: The optimizer state.
        model_state: The buffers, as the root's replica left them; None without any.
    """

    params: PyTree
    opt_state: PyTree
    model_state: PyTree


class Round(NamedTuple):
    """What stages 2 to 8 of some rows leave behind, before the sum and the optimizer.

    Attributes:
        gradients: Parts of the gradient of the total, on the root: of each replica, or
            one sum.
        results: The loss and the metrics, as pairs to be summed, on the output device.
        model_state: The root's buffers.
    """

    gradients: list[Arrays]
    results: dict[str, Mean]
    model_state: PyTree

    def summed(self) -> "Round":
        """With one sum of gradients, in buffers of its own."""
        zeros = [jnp.zeros_like(g, device=g.sharding) for g in self.gradients[0]]
        return self._replace(gradients=[_add_to(zeros, self.gradients)])

    def plus(self, other: "Round") -> "Round":
        """Adds another round to this `summed` one, whose gradients are donated."""
        (total,) = self.gradients
        observe.settle()
        total = _add_to(total, other.gradients)
        results = _summed(self.results, other.results)
        return Round([total], results, other.model_state)


class TrainStep:
    """A training step, made by `DataParallel.train_step`."""

    def __init__(
        self,
        model: "DataParallel",
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
    ):
        """Binds a model, a loss function and an optimizer."""
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer

    @without_mesh
    def init(self, params: PyTree = None, *, keep_model: bool = True) -> State:
        """The state before the first step: copies, on the root.

        Args:
            params: Where to start; None takes the model's.
            keep_model: False takes parameters and buffers away from the model, so that
                the root holds them once, as in PyTorch; call
                `model.apply(state.params, ...)` from then on.

        Raises:
            TypeError: Parameters that have no gradient.
        """
        params = self.model.params if params is None else params
        check_params(params, "step.init")
        given = jax.device_put((params, self.model.model_state), self.model.root)
        if not keep_model:
            self.model.params = self.model.model_state = None
        return _init(self.optimizer, *given)

    @without_mesh
    def __call__(
        self, state: State, inputs: Any, targets: PyTree, **keywords: Any
    ) -> tuple[State, dict[str, Any]]:
        """One optimizer update, by all eight stages.

        Args:
            state: Donated: its arrays serve one step. Moved to the root, if it is on
                another device or on the host.
            inputs: The input of `apply_fn`; a tuple holds several positional ones.
            targets: What `loss_fn` compares with; goes to the output device whole.
            **keywords: Keyword inputs of `apply_fn`.

        Returns:
            The next state, and the metrics, `"loss"` among them.

        Raises:
            RuntimeError: A state that was given to a step before.
            Exception: What a call of the model raises.
        """
        check_alive(state)
        state = self._at_root(state)
        return self.update(state, self.run(state, inputs, targets, keywords))

    def run(
        self,
        state: State,
        inputs: Any,
        targets: PyTree,
        keywords: dict[str, Any],
        rows: int | None = None,
    ) -> Round:
        """Stages 1 to 8, without the sum and the optimizer.

        Args:
            state: Not donated.
            inputs: As of a step.
            targets: As of a step.
            keywords: As of a step.
            rows: Weight of a bare scalar loss, if several rounds make one step.
        """
        model = self.model
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        whole = (state.params, state.model_state)
        targets = self._place(state, targets)  # 1
        slices = model.split(whole, inputs, keywords)  # 3
        devices = slices.devices
        given = [
            [*own, *part]
            for own, part in zip(
                functional.copies(*whole, devices),  # 2
                slices.inputs,
                strict=True,
            )
        ]
        trained = len(jax.tree.leaves(state.params))
        made, saved = replicas.forward(slices, given, trained)  # 4
        gather, parts, structure = functional.gathering(
            [output for output, _ in made], devices, model.output_device, model.dim
        )
        parts = gather.collect(parts)  # 5
        results, cotangents = self._loss(parts, structure, targets, rows)  # 6
        cotangents = gather.spread(cotangents)  # 7
        gradients = replicas.backward(saved, devices, given, cotangents, slices.sizes)
        gradients = Replicate(devices).collect(gradients)  # 8
        return Round(gradients, results, made[0][1])

    def update(self, state: State, done: Round) -> tuple[State, dict[str, Any]]:
        """The rest of stage 8: the sum and the optimizer.

        Args:
            state: Donated.
            done: The gradients of all rows.
        """
        observe.settle()
        root, output_device = self.model.root, self.model.output_device
        weight = done.results["loss"].weight
        if weight is not None:
            about = ("8 reduce", "weight of the loss")
            (weight,) = transfers.send([weight], output_device, root, *about)
        began = observe.now()
        args = (self.optimizer, done.gradients, weight, state.params, state.opt_state)
        lower = functools.partial(_update.lower, *args)
        params, opt_state = _update(*args)
        about = ("8 optimizer", "sum and update", None, root, root, done.gradients)
        made = {"parameters": params, "optimizer state": opt_state}
        observe.tell(*about, made, began, lower)
        metrics = _metrics(done.results)
        return State(params, opt_state, done.model_state), metrics

    def _at_root(self, state: State) -> State:
        """The state, moved to the root if it is anywhere else."""
        root = self.model.root
        if all(is_on(leaf, root) for leaf in jax.tree.leaves(state)):
            return state
        return jax.device_put(state, root)

    def _place(self, state: State, targets: PyTree) -> PyTree:
        """Targets on the output device; the state is on the root already."""
        root = self.model.root
        held = {"parameters": state.params, "optimizer state": state.opt_state}
        held["buffers"] = state.model_state
        observe.tell("1 place", "state", None, root, root, [], held, observe.now())
        check_arrays(targets, "a train step", "targets")
        leaves, structure = jax.tree.flatten(targets)
        about = ("1 place", "targets")
        target = self.model.output_device
        placed = [
            transfers.send([leaf], transfers.where(leaf), target, *about)[0]
            for leaf in leaves
        ]
        return jax.tree.unflatten(structure, placed)

    def _loss(
        self, parts: list[Arrays], structure: Any, targets: PyTree, rows: int | None
    ) -> tuple[dict[str, Mean], list[Arrays]]:
        """Loss and metrics, and the gradient with respect to the replicas' outputs."""
        began = observe.now()
        args = (self.loss_fn, structure, self.model.dim, rows, parts, targets)
        device = self.model.output_device
        try:
            results, cotangents = loss_and_cotangents(*args)
        except Exception as error:
            outputs, given = jax.tree.map(jnp.shape, (parts, targets))
            error.add_note(
                f"Raised by loss_fn, in stage 6 loss on {name(device)}. It got the "
                f"outputs of shapes {outputs}, joined along dim={self.model.dim}, and "
                f"targets of shapes {given}. Give targets that fit the gathered output."
            )
            raise
        about = ("6 loss", "loss and its gradient", None, device, device, parts)
        made = {"loss": results, "output gradients": cotangents}
        observe.tell(
            *about, made, began, functools.partial(loss_and_cotangents.lower, *args)
        )
        return results, cotangents


def check_alive(state: State) -> None:
    """Refuses a state that was donated: jax 0.10 crashes the process on one.

    Raises:
        RuntimeError: Its arrays have been deleted.
    """
    leaves = jax.tree.leaves(state.params)
    if leaves and is_deleted(leaves[0]):
        raise RuntimeError(
            "A train step got a state whose arrays have been deleted. A step donates "
            "the state that it is given, so that each serves one step. Go on with the "
            "state that the step returned, or copy it before: jax.tree.map(jnp.copy, "
            "state)."
        )


@functools.partial(jax.jit, static_argnums=0)
def _init(optimizer: optax.GradientTransformation, params: PyTree, state: PyTree):
    """Copies, so that the caller's arrays survive, and the optimizer's first state."""
    params, state = own_copy((params, state))
    return State(params, optimizer.init(params), state)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def loss_and_cotangents(
    loss_fn: Callable[..., Any],
    structure: Any,
    dim: int,
    rows: int | None,
    parts: list[Arrays],
    targets: PyTree,
) -> tuple[dict[str, Mean], list[Arrays]]:
    """Joins the outputs; the cotangents of the join are the replicas' own."""
    leaves, inner = jax.tree.flatten(parts)
    smooth = [leaf for leaf in leaves if is_summable(leaf)]

    def total(smooth):
        given = iter(smooth)
        merged = [next(given) if is_summable(leaf) else leaf for leaf in leaves]
        whole = transfers.join(jax.tree.unflatten(inner, merged), dim)
        output = loss_fn(jax.tree.unflatten(structure, whole), targets)
        loss, aux = split_loss(output)
        _check_aux(aux)
        if rows is not None and loss.weight is None:
            weight = jnp.asarray(rows, loss.total.dtype)
            loss = Mean(loss.total * weight, weight)
        metrics = {
            name: with_weight(loss, value)
            for name, value in (aux.metrics or {}).items()
        }
        return loss.total, {"loss": loss, **metrics}

    (_, results), cotangents = jax.value_and_grad(total, has_aux=True)(smooth)
    each = len(cotangents) // len(parts)
    return results, [cotangents[i * each : (i + 1) * each] for i in range(len(parts))]


def _add_to(total: Arrays, parts: list[Arrays]) -> Arrays:
    """Adds parts of a gradient to a sum, which is donated; told to observers."""
    began = observe.now()
    lower = functools.partial(_accumulate.lower, total, parts)
    total = _accumulate(total, parts)
    root = transfers.where(total[0])
    about = ("8 reduce", "sum of rounds", None, root, root, parts)
    observe.tell(*about, {"gradient": total}, began, lower)
    return total


@functools.partial(jax.jit, donate_argnums=0)
def _accumulate(total: Arrays, parts: list[Arrays]) -> Arrays:
    """Accumulated in one set of buffers, however many rounds there are."""
    return transfers.add([total, *parts])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def _update(
    optimizer: optax.GradientTransformation,
    parts: list[Arrays],
    weight: jax.Array | None,
    params: PyTree,
    opt_state: PyTree,
) -> tuple[PyTree, PyTree]:
    """The sum of the gradients over the weight, and the optimizer."""
    mean = [divided(Mean(leaf, weight)) for leaf in transfers.add(parts)]
    gradient = jax.tree.unflatten(jax.tree.structure(params), mean)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _metrics(results: dict[str, Mean]) -> dict[str, Any]:
    """Totals over weights."""
    if all(mean.weight is None for mean in results.values()):
        return {name: mean.total for name, mean in results.items()}
    return _divided(results)


@jax.jit
def _divided(results: dict[str, Mean]) -> dict[str, Any]:
    return {name: divided(mean) for name, mean in results.items()}


@jax.jit
def _summed(results: dict[str, Mean], others: dict[str, Mean]) -> dict[str, Mean]:
    return jax.tree.map(jnp.add, results, others)


def _check_aux(aux: Aux) -> None:
    """Checks what a loss function returned beside the loss."""
    if aux.model_state is not None:
        raise ValueError(
            "loss_fn returned a model_state. It sees the gathered output only; buffers "
            "are the business of apply_fn, which gets model_state= if DataParallel did "
            "and returns (output, model_state). Return Aux(metrics=...) alone."
        )
    if "loss" in (aux.metrics or {}):
        raise ValueError(
            "loss_fn returned a metric named 'loss'. That name holds the loss in the "
            "metrics of a step. Rename it."
        )
