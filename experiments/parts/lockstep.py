"""Trains in several ways at once, on the same batches, and compares at every step."""

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jaxdp
from jaxdp.designs import Design

PyTree = Any
Batch = PyTree
ALONE = "single device"


class Trainer(NamedTuple):
    """One way of training; it keeps its state.

    Attributes:
        step: Takes a host batch, makes one update, returns the loss.
        params: The parameters now, on the host.
        copies: The copies on all devices, for each parameter: of what they keep, or in
            stage 3 of ZeRO, where they keep parts, of what they gather. None while
            replicas train alone.
        program: The compiled step.
        kept_bytes: What the fullest device keeps between steps.
    """

    step: Callable[[Batch], jax.Array]
    params: Callable[[], PyTree]
    copies: Callable[[], list[list[np.ndarray]]]
    program: jax.stages.Compiled
    kept_bytes: int


class History(NamedTuple):
    """What lockstep training saw, by trainer; one entry per step."""

    losses: dict[str, list[float]]
    differences: dict[
        str, list[float]
    ]  # largest, of a parameter to the single device's
    compared: dict[str, int]  # arrays compared with the first device's copy, all steps
    differing: dict[str, int]  # those that had other bits


def single(
    loss_fn: Callable[[PyTree, Batch], jax.Array],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    batch: Batch,
) -> Trainer:
    """Plain optax on one device, with nothing of jaxdp: the reference."""

    @jax.jit
    def update(params, opt_state, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    state = params, optimizer.init(params)

    def step(batch):
        nonlocal state
        *now, loss = update(*state, batch)
        state = tuple(now)
        return loss

    def copies():
        return [[np.asarray(leaf)] for leaf in jax.tree.leaves(state[0])]

    def host_params():
        return jax.device_get(state[0])

    program = update.lower(*state, batch).compile()
    return Trainer(step, host_params, copies, program, _fullest(state))


def parallel(
    loss_fn: Callable[[PyTree, Batch], jax.Array],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    batch: Batch,
    mesh: Mesh,
    design: Design,
) -> Trainer:
    """The library, with one design."""
    train = jaxdp.data_parallel(loss_fn, optimizer, mesh, design=design)
    state = train.init(params)
    program = train.lower(state, batch).compile()

    def step(batch):
        nonlocal state  # donated
        state, metrics = train.step(state, jaxdp.shard_batch(batch, mesh))
        return metrics["loss"]

    def copies():
        if isinstance(design, jaxdp.LocalSGD) and int(state.step) % design.sync_every:
            return []
        in_parts = isinstance(design, jaxdp.Zero) and design.stage == 3
        whole = train.params(state) if in_parts else state.params
        return [
            [np.asarray(shard.data) for shard in leaf.addressable_shards]
            for leaf in jax.tree.leaves(whole)
        ]

    def host_params():
        return jax.device_get(train.params(state))

    return Trainer(step, host_params, copies, program, _fullest(state))


def train(
    trainers: dict[str, Trainer],
    batches: Iterable[Batch],
    on_step: Callable[[], Any] = lambda: None,
) -> History:
    """Trains all on the same batches; one trainer is named `ALONE`."""
    history = History(
        losses={name: [] for name in trainers},
        differences={name: [] for name in trainers if name != ALONE},
        compared=dict.fromkeys(trainers, 0),
        differing=dict.fromkeys(trainers, 0),
    )
    for batch in batches:
        for name, trainer in trainers.items():
            history.losses[name].append(float(trainer.step(batch)))
            same = _same_bits(trainer.copies())
            history.compared[name] += len(same)
            history.differing[name] += same.count(False)
        reference = trainers[ALONE].params()
        for name, differences in history.differences.items():
            differences.append(_largest(trainers[name].params(), reference))
        on_step()
    return history


def _fullest(state: PyTree) -> int:
    """Bytes of all arrays on the device that has most."""
    held = collections.Counter[jax.Device]()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def _same_bits(copies: list[list[np.ndarray]]) -> list[bool]:
    """For every copy but the first device's, whether it has the same bits."""
    return [
        first.tobytes() == other.tobytes()
        for first, *others in copies
        for other in others
    ]


def _largest(tree: PyTree, reference: PyTree) -> float:
    """The largest absolute difference of any entry."""
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), tree, reference)
    return float(max(jax.tree.leaves(apart)))
