"""Our side of what distributing costs: one process with one CPU device and one thread.

`python -m benchmarks.distributing_jax RANK COUNT PORT`, started by
`benchmarks.distributing`. The processes find each other on the loopback interface and
exchange by gloo, as JAX does on CPUs; it binds to the address of the host's name.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from benchmarks import distributing_problem as problem
from experiments import models
from experiments.harness import processes

MODELS = {"cnn": models.DigitsNet, "transformer": models.CharTransformer}
DESIGNS: dict[str, jaxdp.Design] = {
    "ring": jaxdp.RingAllReduce(),
    "doubling": jaxdp.AllReduce("recursive_doubling"),
    "native": jaxdp.NativeAllReduce(25.0),
}


class Training:
    """A model, its batch, and its steps in every way that was asked for."""

    def __init__(self, model: str, rank: int, mesh: Mesh):
        """Makes parameters and batch."""
        self.mesh = mesh
        self.optimizer = optax.sgd(problem.LEARNING_RATE, momentum=problem.MOMENTUM)
        self.apply, self.params = models.functional(MODELS[model], seed=0)
        self.params = jax.tree.map(np.asarray, self.params)
        self.batch = problem.local_batch(model, rank)
        self.steps: dict[str, Callable[[], Any]] = {}

    def loss_fn(self, params: Any, batch: Any) -> jax.Array:
        """The mean cross entropy."""
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(
            self.apply(params, x), y
        ).mean()

    def step(self, way: str) -> Callable[[], Any]:
        """One more step, which returns its loss."""
        if way not in self.steps:
            make = self._alone if way == "alone" else self._distributed
            self.steps[way] = make(way)
        return self.steps[way]

    def save(self, path: str) -> None:
        """Writes the first parameters, named by dots."""
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        named = {
            jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in leaves
        }
        np.savez(path, **named)

    def _alone(self, way: str) -> Callable[[], Any]:
        """A step without jaxdp, of this process's rows alone."""
        del way

        def update(params, opt_state, batch):
            loss, gradients = jax.value_and_grad(self.loss_fn)(params, batch)
            updates, opt_state = self.optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        jitted = jax.jit(update, donate_argnums=(0, 1))
        (device,) = jax.local_devices()
        kept = jax.device_put((self.params, self.optimizer.init(self.params)), device)
        batch = jax.device_put(self.batch, device)

        def run():
            nonlocal kept
            *kept, loss = jitted(*kept, batch)
            return loss

        return run

    def _distributed(self, way: str) -> Callable[[], Any]:
        """A step of `jaxdp.data_parallel`, of all processes' rows."""
        train = jaxdp.data_parallel(
            self.loss_fn, self.optimizer, self.mesh, DESIGNS[way]
        )
        rows = NamedSharding(self.mesh, P("data"))
        batch = jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(rows, x), self.batch
        )
        state = train.init(self.params)

        def run():
            nonlocal state
            state, metrics = train.step(state, batch)
            return metrics["loss"]

        return run


def main(rank: int, count: int, port: str) -> None:
    """Serves the commands of `benchmarks.distributing`."""
    processes.pin(rank)
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    mesh = jaxdp.data_mesh()
    kept: dict[str, Training] = {}

    def answer(model: str, way: str, steps: int, params: str = "") -> Any:
        """Takes steps; returns milliseconds of each, and the last loss."""
        if model not in kept:
            kept[model] = Training(model, rank, mesh)
            if rank == 0:
                kept[model].save(params)
        step = kept[model].step(way)
        start, loss = time.perf_counter(), 0.0
        for _ in range(steps):
            loss = jax.block_until_ready(step())
        milliseconds = 1e3 * (time.perf_counter() - start) / steps
        return milliseconds, float(loss)

    processes.serve(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
