"""Trains on rows that nothing divides, on several devices and on one, step by step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jaxdp
from experiments.harness.result import Rows
from experiments.parts import uneven_net as net
from experiments.parts.uneven_net import Batch, Measured, Network, difference

PyTree = Any
COMPILATION = "/jax/core/compile/backend_compile_duration"
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
SEED = 3  # of the order of rows


class Run(NamedTuple):
    """What training on one number of devices found.

    Attributes:
        rows: One per length.
        params: Parameters after the last length.
        model_state: Running averages then.
        step: The step, not compiled.
    """

    rows: Rows
    params: PyTree
    model_state: PyTree
    step: jax.stages.Lowered


@jax.jit
def update(gradient: PyTree, opt_state: PyTree, params: PyTree):
    """One update of the optimizer: parameters, and its state."""
    updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


class Alone:
    """Training on one device, with nothing of the library; it keeps its state."""

    def __init__(self, given: Network):
        """Starts from the network's parameters."""
        self.given, self.measure = given, net.one_device()
        self.restart()

    def restart(self) -> None:
        """Goes back to the first parameters."""
        self.params, self.model_state = self.given.params, self.given.model_state
        self.opt_state = OPTIMIZER.init(self.params)

    def step(self, batch: Batch) -> Measured:
        """One update from real rows."""
        found = self.measure(self.params, self.model_state, batch)
        self.params, self.opt_state = update(
            found.gradient, self.opt_state, self.params
        )
        self.model_state = found.model_state
        return found


class Parallel:
    """The same training on several devices, by the library; it keeps its state."""

    def __init__(self, given: Network, devices: int):
        """Makes the program; it compiles at the first step."""
        self.given, self.mesh = given, jaxdp.data_mesh(devices)
        self.train = jaxdp.data_parallel(
            net.parallel_loss(given), net.recording(OPTIMIZER), self.mesh
        )
        self.restart()

    def restart(self) -> None:
        """Goes back to the first parameters."""
        state = self.given.model_state
        self.state = self.train.init(self.given.params, model_state=state)

    def now(self) -> tuple[PyTree, PyTree]:
        """Parameters and running averages, on the host."""
        return jax.device_get((self.train.params(self.state), self.state.model_state))

    def step(self, padded: PyTree) -> Measured:
        """One update."""
        self.state, metrics = self.train.step(self.state, padded)
        _, gradient = self.state.opt_state
        found = metrics["loss"], metrics["accuracy"], gradient, self.state.model_state
        return jax.device_get(Measured(*found))

    def lowered(self, padded: PyTree) -> jax.stages.Lowered:
        """The step, not compiled."""
        return self.train.lower(self.state, padded)


def train(
    lengths: Sequence[int],
    devices: int,
    batch_size: int,
    epochs: int,
    advance: Callable[[], None],
) -> Run:
    """Trains on the first digits, as many as each length says, with one program."""
    given = net.network(jaxdp.BatchNorm, axis_name="data")
    parallel, alone = Parallel(given, devices), Alone(given)
    rows = []
    with compilations_of("_step") as compiled:
        for length in lengths:
            parallel.restart()
            alone.restart()
            found = compare(parallel, alone, length, batch_size, epochs)
            rows.append({"rows": length, "devices": devices} | found)
            advance()
    rows = [row | {"compilations": len(compiled)} for row in rows]
    batch = net.padded(1, batch_size, parallel.mesh)
    return Run(rows, *parallel.now(), parallel.lowered(batch))


def compare(
    parallel: Parallel, alone: Alone, length: int, batch_size: int, epochs: int
) -> dict[str, Any]:
    """Trains both for some epochs: what they used, and how far apart they were.

    Gradients, losses and statistics are compared at every step, from the parameters of
    the parallel run; means and last parameters with a run of its own on one device.
    """
    data = net.take(net.data(), slice(length))
    sampler = jaxdp.Sampler(length, batch_size, seed=SEED)
    used, copied, apart, here, there = [], 0, [], [], []
    for epoch in range(epochs):
        batches = jaxdp.epoch_batches(data, sampler, parallel.mesh)
        for padded, rows in zip(batches, sampler.epoch(epoch), strict=True):
            batch = net.take(data, rows.indices[rows.mask])
            expected = alone.measure(*parallel.now(), batch)
            here.append(parallel.step(padded))
            there.append(alone.step(batch))
            apart.append([*map(difference, here[-1], expected)])
            used.append(int(padded.mask.sum()))
            copied += len(padded.mask) - used[-1]
    worst = dict(zip(Measured._fields, np.max(apart, axis=0).tolist(), strict=True))
    losses, accuracies = (
        [
            float(np.average([step[i] for step in run], weights=used))
            for run in (here, there)
        ]
        for i in (0, 1)
    )
    return {
        "batches": len(sampler),
        "rows used": sum(used) // epochs,
        "copies masked": copied // epochs,
        "gradient apart": worst["gradient"],
        "largest gradient": max(net.largest(step.gradient) for step in here),
        "loss apart": worst["loss"],
        "accuracy apart": worst["accuracy"],
        "statistics apart": worst["model_state"],
        "mean loss": losses[0],
        "mean loss apart": abs(losses[0] - losses[1]),
        "mean accuracy": accuracies[0],
        "mean accuracy apart": abs(accuracies[0] - accuracies[1]),
        "parameters apart": difference(parallel.now()[0], alone.params),
    }


@contextmanager
def compilations_of(name: str) -> Iterator[list[str]]:
    """Collects the compilations of one function inside the block."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        if event == COMPILATION and name in str(about["fun_name"]):
            found.append(str(about["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
