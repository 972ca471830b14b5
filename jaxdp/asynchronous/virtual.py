"""Asynchronous training in virtual time: real gradients on real data, timed by a model.

A run that would need 64 machines fits on one, takes as long as its gradients, and is
the same each time; see `jaxdp.asynchronous.simulation` for how.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import optax

from jaxdp.asynchronous.policies import Policy, check_count
from jaxdp.asynchronous.run import Run
from jaxdp.asynchronous.server import Server, default_device
from jaxdp.asynchronous.simulation import Clock, End, Measure, Simulation, Worker
from jaxdp.asynchronous.times import ComputeTime, Constant, Link
from jaxdp.asynchronous.worker import loss_and_gradients
from jaxdp.mesh import without_mesh
from jaxdp.replicated.devices import resolve_one

PyTree = Any


@without_mesh
def simulate(
    loss_fn: Callable[[PyTree, PyTree], Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    batches: Callable[[int, int], PyTree],
    *,
    workers: int,
    policy: Policy,
    iterations: int | None = None,
    updates: int | None = None,
    until_s: float | None = None,
    compute: ComputeTime | Sequence[ComputeTime] = Constant(1.0),  # noqa: B008
    link: Link | Sequence[Link] = Link(),  # noqa: B008 (frozen and stateless)
    servers: int = 1,
    seed: int = 0,
    evaluate: Callable[[PyTree], Any] | None = None,
    evaluate_every: int = 1,
    devices: Sequence[Any] | None = None,
) -> Run:
    """Trains with workers and servers whose time is virtual.

    Devices: the server's parameters are on the first device, worker `w` computes on
    device `w % len(devices)`.

    Cost: one gradient per iteration, compiled once per device, and one update per
    version, compiled once. Kept at a time: a version and a gradient per worker.

    Args:
        loss_fn: `loss_fn(params, batch)`, a scalar or `jaxdp.Mean`.
        optimizer: Any optax transformation; see `Server` for what it is passed.
        params: Where to start.
        batches: `batches(worker, iteration)`, what the worker computes on.
        workers: Their number.
        policy: Who waits for whom, and how many pushes make an update.
        iterations: How many each worker does; under `Backup`, how many rounds there
            are.
        updates: Ends the run when so many were made.
        until_s: Ends the run at this virtual time. One of the three is needed; the
            first one reached counts.
        compute: How long computing takes; a sequence has one entry per worker.
        link: The link of a server; a sequence has one entry per server.
        servers: How many share the parameters, equally. Each has a link of its own.
        seed: Of the durations.
        evaluate: `evaluate(params)`, a number to record: of version 0, of the last, and
            between.
        evaluate_every: In updates.
        devices: None takes the default device.

    Returns:
        The run.

    Raises:
        ValueError: A number, a sequence or a policy that does not fit.
        TypeError: A count that is no integer; parameters without a gradient.
        RuntimeError: Nobody can go on; or, if only `updates` ends the run, every push
            is refused.

    Example:
        >>> import jax.numpy as jnp, jaxdp, optax
        >>> run = jaxdp.asynchronous.simulate(
        ...     lambda x, batch: x**2 / 2, optax.sgd(0.5), jnp.array(1.0),
        ...     batches=lambda worker, iteration: None, workers=4, iterations=1,
        ...     policy=jaxdp.asynchronous.Eventual())
        >>> print(run.params, run.staleness)
        -1.0 {0: 1, 1: 1, 2: 1, 3: 1}
    """
    policy.check(workers)
    check_count("simulate", "servers", servers, at_least=1)
    check_count("simulate", "evaluate_every", evaluate_every, at_least=1)
    end = End(iterations, updates, until_s)
    _check_end(end)
    times = _one_each(compute, workers, "compute", "workers", ComputeTime)
    links = _one_each(link, servers, "link", "servers", Link)
    devices = _devices(devices)
    clock = Clock()
    server = Server(
        optimizer,
        policy=policy,
        workers=workers,
        device=devices[0],
        now=lambda: clock.now_s,
    )
    server.init(params)
    each = [
        Worker(number, devices[number % len(devices)], times[number], seed)
        for number in range(workers)
    ]
    program = loss_and_gradients(loss_fn)
    measure = Measure(evaluate, evaluate_every)
    return Simulation(clock, server, links, each, program, batches, measure).run(end)


def _check_end(end: End) -> None:
    """Refuses a run without an end, or without a beginning."""
    if end == (None, None, None):
        raise ValueError(
            "simulate got no end: iterations, updates and until_s are None. A run "
            "needs at least 1 of them. Pass, for example, iterations=100."
        )
    for name in ("iterations", "updates"):
        if getattr(end, name) is not None:
            check_count("simulate", name, getattr(end, name), at_least=1)
    if end.until_s is not None and not 0 < end.until_s < math.inf:
        raise ValueError(
            f"simulate got until_s={end.until_s}. It must be finite and more than 0. "
            "Pass seconds, or None."
        )


def _devices(given: Sequence[Any] | None) -> list[Any]:
    """The devices of workers; the first one is the server's."""
    if given is None:
        return [default_device()]
    if not len(given):
        raise ValueError(
            "simulate got devices=[]. It needs at least 1, where the server is. Name "
            "some, or pass None for the default device."
        )
    return [
        resolve_one(each, f"devices[{i}]", "simulate") for i, each in enumerate(given)
    ]


def _one_each(given: Any, count: int, name: str, what: str, kind: Any) -> list[Any]:
    """One value for each worker or server, from one for all or a sequence."""
    each = list(given) if isinstance(given, list | tuple) else [given] * count
    bad = [value for value in each if not isinstance(value, kind)]
    if bad:
        raise TypeError(
            f"simulate got {bad[0]!r} in {name}. It takes jaxdp.asynchronous classes: "
            "Constant, LogNormal or Stops for compute, and Link for link. Pass "
            "Constant(1.0) for one second."
        )
    if len(each) != count:
        raise ValueError(
            f"simulate got {len(each)} entries in {name} for {count} {what}. It needs "
            "one each. Pass as many, or a single value for all."
        )
    return each
