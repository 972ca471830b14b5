"""One host's JAX process: training steps of every design, and what they consist of.

`python -m experiments.parts.bandwidth_steps_jax RANK COUNT COORDINATOR`, started by
`experiments.parts.bandwidth_training`. A process has two devices, and a rank is that of
a process. Designs that are one program run on the first; `jaxdp.streams` computes
there and communicates on the second.
"""

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from experiments.harness import processes
from experiments.parts import bandwidth_mlp as mlp

COMPUTE = "compute"
FIRST_MB = 1.0  # of the first bucket, as DDP's
DESIGNS = {
    "GatherToRoot": lambda cap: jaxdp.GatherToRoot(),
    "RingAllReduce": lambda cap: jaxdp.RingAllReduce(cap, FIRST_MB),
    "NativeAllReduce": lambda cap: jaxdp.NativeAllReduce(cap),
}
STREAMS: dict[str, Literal[0, 1]] = {"streams, staged": 0, "streams, delay 1": 1}
Step = Callable[[], tuple[Any, Any]]  # loss and parameters; what is in flight, too


def loss_fn(params: Sequence[jax.Array], batch: Any) -> jax.Array:
    """Mean squared error of the network."""
    x, y = batch
    for weights in params[:-1]:
        x = jax.nn.relu(x @ weights)
    return jnp.mean((x @ params[-1] - y) ** 2)


def idle_loss_fn(params: Sequence[jax.Array], batch: Any) -> jax.Array:
    """A loss whose gradients are the parameters, times what the rows say.

    Gradients alike in all places would not do: XLA sums one number for all of them.
    """
    scale = jnp.mean(batch[0][0] ** 2)
    return scale * sum(jnp.vdot(weights, weights) for weights in params) / 2


@functools.cache
def made(way: str, sizes: mlp.Sizes, cap_mb: float, idle: bool) -> Step:
    """One more step of a design; if `idle`, without the network's computation."""
    optimizer, loss = optax.sgd(mlp.LEARNING_RATE), idle_loss_fn if idle else loss_fn
    if way == COMPUTE:
        return _alone(loss, optimizer, sizes)
    if way in STREAMS:
        both = jaxdp.streams.two_streams()
        mesh = both.compute
        train = jaxdp.streams.data_parallel(
            loss,
            optimizer,
            both,
            delay=STREAMS[way],
            bucket_cap_mb=cap_mb,
            first_bucket_mb=FIRST_MB,
            algorithm="auto",  # the ring, but for two hosts
        )
    else:
        mesh = jaxdp.data_mesh(jax.devices()[::2])
        train = jaxdp.data_parallel(loss, optimizer, mesh, DESIGNS[way](cap_mb))
    rows = NamedSharding(mesh, P("data"))
    batch = tuple(
        jax.make_array_from_process_local_data(rows, part)
        for part in mlp.batch(sizes, jax.process_index())
    )
    state = train.init(mlp.params(sizes))

    def step():
        nonlocal state  # donated
        state, metrics = train.step(state, batch)
        return (metrics["loss"], state.params), state

    return step


def _alone(loss: Any, optimizer: Any, sizes: mlp.Sizes) -> Step:
    """A step without jaxdp, of this host's rows alone."""
    device = jax.local_devices()[0]
    params = mlp.params(sizes)
    kept = jax.device_put((params, optimizer.init(params)), device)
    batch = jax.device_put(mlp.batch(sizes, jax.process_index()), device)

    def update(kept, batch):
        value, gradients = jax.value_and_grad(loss)(kept[0], batch)
        updates, opt_state = optimizer.update(gradients, kept[1], kept[0])
        return (optax.apply_updates(kept[0], updates), opt_state), value

    jitted = jax.jit(update, donate_argnums=0)

    def step():
        nonlocal kept
        kept, value = jitted(kept, batch)
        return (value, kept), None

    return step


def seconds(
    way: str, sizes: list[int], cap_mb: float, idle: bool, steps: int
) -> tuple[float, float]:
    """Seconds of a step, and the loss of the first.

    One step more is taken, first: it fills the pipeline of late gradients. What is in
    flight after the last is waited for, but is no part of the time.
    """
    step = made(way, mlp.Sizes(*sizes), cap_mb, idle)
    ready, flight = step()
    jax.block_until_ready(ready)
    first, start = ready[0], time.perf_counter()
    for _ in range(steps):
        ready, flight = step()
        jax.block_until_ready(ready)
    each = (time.perf_counter() - start) / steps
    jax.block_until_ready(flight)
    return each, float(first)


def main(rank: int, count: int, coordinator: str) -> None:
    """Serves the commands of `experiments.parts.bandwidth_training`."""

    def start() -> None:
        jaxdp.initialize(coordinator, count, rank)

    commands = {"start": start, "seconds": seconds}
    processes.serve(lambda do, **options: commands[do](**options))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
