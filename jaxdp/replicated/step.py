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
import optax

from jaxdp.loss import Mean, divided
from jaxdp.mesh import without_mesh
from jaxdp.replicated import functional, observe, replicas, transfers
from jaxdp.replicated.gathered_loss import gathered_loss
from jaxdp.replicated.inputs import check_arrays
from jaxdp.replicated.micro import Micro
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
    ) -> Micro:
        """Stages 1 to 8, without the sum and the optimizer.

        Args:
            state: Not donated.
            inputs: As of a step.
            targets: As of a step.
            keywords: As of a step.
            rows: Weight of a bare scalar loss, if these are a micro-batch of a step.
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
        results, cotangents = gathered_loss(  # 6
            *(self.loss_fn, structure, model.dim, rows, parts, targets),
            device=model.output_device,
        )
        cotangents = gather.spread(cotangents)  # 7
        gradients = replicas.backward(saved, devices, given, cotangents, slices.sizes)
        gradients = Replicate(devices).collect(gradients)  # 8
        return Micro(gradients, results, made[0][1])

    def update(self, state: State, done: Micro) -> tuple[State, dict[str, Any]]:
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
        return State(params, opt_state, done.model_state), done.metrics()

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


def check_step(step: Any, caller: str) -> None:
    """Refuses what is no train step.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"{caller} got step of type {type(step).__name__}. It must be a "
            "jaxdp.replicated.TrainStep. Make one with "
            "model.train_step(loss_fn, optimizer)."
        )


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
