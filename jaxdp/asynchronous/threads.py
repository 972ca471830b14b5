"""Asynchronous training as it really happens: workers are threads on real devices.

One Python process controls all devices. JAX releases the interpreter while it computes
and copies, so that workers overlap. Policy, server and log are those of `simulate`;
only the clock is real. See `jaxdp.asynchronous.crew` for what each thread does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jaxdp.asynchronous.crew import Crew, Worker
from jaxdp.asynchronous.policies import Policy, check_count
from jaxdp.asynchronous.run import Run
from jaxdp.asynchronous.worker import loss_and_gradients

PyTree = Any


def train(
    loss_fn: Callable[[PyTree, PyTree], Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    batches: Callable[[int, int], PyTree],
    *,
    workers: int,
    policy: Policy,
    iterations: int,
    devices: Sequence[Any] | None = None,
    server_device: Any = None,
    before_push: Callable[[int, int], None] | None = None,
) -> Run:
    """Trains with a thread per worker, and a server that they really race for.

    Devices: worker `w` computes on device `w % len(devices)`, the server updates on its
    own. Arrays that `batches` returns may be anywhere.

    Cost: one gradient per iteration and one update per version; per iteration the
    parameters travel to the worker's device once and a gradient back. Before the clock
    starts, each worker computes one gradient more, so that its program is compiled.

    Args:
        loss_fn: `loss_fn(params, batch)`, a scalar or `jaxdp.Mean`.
        optimizer: Any optax transformation; see `Server` for what it is passed.
        params: Where to start.
        batches: `batches(worker, iteration)`, what the worker computes on. Called once
            each: for iteration 0 before the clock starts, else by the worker's thread.
        workers: Their number.
        policy: Who waits for whom, and how many pushes make an update.
        iterations: How many each worker does; under `Backup`, how many rounds there
            are.
        devices: None takes all devices of this process.
        server_device: None takes the first of `devices`.
        before_push: `before_push(worker, iteration)`, called in the worker's thread
            when its gradient is there: `time.sleep` makes a straggler, an event holds a
            worker. Counts as computing. It must return for `train` to return.

    Returns:
        The run. No thread outlives the call.

    Raises:
        ValueError: A number or a policy that does not fit.
        TypeError: A count that is no integer; parameters without a gradient.
        RuntimeError: All workers wait; the message has their clocks.
        Exception: What a worker raised, after all others have stopped before their
            next pull; a note names the worker and its iteration.

    Example:
        >>> import jax.numpy as jnp, jaxdp, optax
        >>> run = jaxdp.asynchronous.train(
        ...     lambda x, target: (x - target)**2, optax.sgd(0.25), jnp.array(8.0),
        ...     batches=lambda worker, iteration: jnp.array([0.0, 4.0])[worker],
        ...     workers=2, iterations=1, policy=jaxdp.asynchronous.Sequential())
        >>> print(run.params, run.updates)  # 8 - 0.25 * (16 + 8) / 2
        5.0 1
    """
    check_count("train", "iterations", iterations, at_least=1)
    devices = jax.local_devices() if devices is None else list(devices)
    if not devices:
        raise ValueError(
            f"train got no devices for {workers} workers. Worker w computes on device "
            "w % len(devices), so at least 1 is needed. Pass devices=None for all."
        )
    home = devices[0] if server_device is None else server_device
    crew = Crew(optimizer, policy, workers, home, iterations)
    crew.server.init(params)
    program, no_hook = loss_and_gradients(loss_fn), lambda worker, iteration: None
    members = [
        Worker(
            crew, w, devices[w % len(devices)], program, batches, before_push or no_hook
        )
        for w in range(workers)
    ]
    for member in members:
        member.compile()
    crew.run(members)
    jax.block_until_ready(crew.server.params)
    spans = [span for member in members for span in member.spans]
    return Run.collect(crew.server, spans, crew.stamp())
