"""Asynchronous training as it really happens: workers are threads on real devices.

One Python process controls all devices. A worker's thread pulls by copying the server's
parameters to its device, computes there, and pushes by copying the gradient back; JAX
releases the interpreter while it computes and copies, so that workers overlap. Policy,
server and log are those of `simulate`; only the clock is real. One lock is held around
every call of the server, and one condition wakes those who wait for others' pushes.

Arrays are immutable and nothing is donated, so a thread may read parameters that the
server has replaced meanwhile.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal

import jax
import optax

from jaxdp.asynchronous.log import Span
from jaxdp.asynchronous.policies import Policy, check_count
from jaxdp.asynchronous.run import Run
from jaxdp.asynchronous.server import Server, Snapshot
from jaxdp.asynchronous.worker import loss_and_gradients
from jaxdp.loss import Mean

PyTree = Any
INTERRUPTIBLE_S = 0.2
Kind = Literal["wait", "pull", "compute", "push"]


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
    crew = _Crew(optimizer, policy, workers, home, iterations)
    crew.server.init(params)
    program, no_hook = loss_and_gradients(loss_fn), lambda worker, iteration: None
    members = [
        _Worker(
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


class _Crew:
    """What the workers' threads share.

    Attributes:
        turn: Guards all that follows; notified after every push.
        server: Called by who holds `turn`.
        stamped_s: When that one got it: one call of the server is one instant.
        states: What each worker does.
        failure: Why all must stop.
    """

    def __init__(
        self, optimizer: Any, policy: Policy, workers: int, device: Any, iterations: int
    ):
        self.began = time.perf_counter()
        self.turn = threading.Condition()
        self.stamped_s = 0.0
        self.server = Server(
            optimizer,
            policy=policy,
            workers=workers,
            device=device,
            now=lambda: self.stamped_s,
        )
        self.states = ["works"] * workers
        self.iterations = iterations
        self.failure: BaseException | None = None

    def run(self, members: Sequence["_Worker"]) -> None:
        """Runs a thread per worker until all have ended.

        Raises:
            BaseException: The first failure of a worker, or an interrupt.
        """
        # JAX keeps what context managers set per thread.
        settings = jax.enable_x64.value, jax.default_matmul_precision.value
        with ThreadPoolExecutor(len(members), "jaxdp-worker") as pool:
            self.began = time.perf_counter()
            try:
                left = {pool.submit(member.live, *settings) for member in members}
                while left:  # a signal that comes just before a wait does not end it
                    _, left = wait(left, timeout=INTERRUPTIBLE_S)
            except BaseException as error:  # an interrupt, or no more threads
                self.fail(error)
        if self.failure is not None:
            raise self.failure

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.began

    def stamp(self) -> float:
        """The time of the next call of the server."""
        self.stamped_s = self.now()
        return self.stamped_s

    def fail(self, error: BaseException) -> None:
        """Tells all to stop; the first reason counts."""
        with self.turn:
            if self.failure is None:
                self.failure = error
            self.turn.notify_all()

    def may_go_on(self, worker: int) -> bool:
        """Whether a worker may pull, or has to stop."""
        has_to_stop = self.failure is not None or self.has_finished(worker)
        return has_to_stop or not self.server.waits_for(worker)

    def has_finished(self, worker: int) -> bool:
        """Whether a worker has done all its iterations."""
        return self.server.next_iteration(worker) >= self.iterations

    def rest(self, worker: int, state: str) -> None:
        """Notes that a worker does not work; the last one sees if nobody ever will."""
        self.states[worker] = state
        waiting = [w for w, state in enumerate(self.states) if state == "waits"]
        if waiting and "works" not in self.states:
            if not any(map(self.may_go_on, waiting)):
                self.fail(self.server.deadlock("train", self.states))


@dataclasses.dataclass
class _Worker:
    """A worker; its methods run in its thread.

    Attributes:
        iteration: What it is at.
        fetched: Batches that were fetched before their time.
        spans: Its log.
    """

    crew: _Crew
    number: int
    device: Any
    program: Callable[[PyTree, PyTree], tuple[Mean, PyTree]]
    batches: Callable[[int, int], PyTree]
    before_push: Callable[[int, int], None]
    iteration: int = 0
    fetched: dict[int, PyTree] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)

    def compile(self) -> None:
        """Computes a gradient for nothing, in the caller's thread.

        Functions of the user are then traced one after another, not by many threads.
        """
        with self.named():
            self.fetched[0] = self.fetch()
            params = jax.device_put(self.crew.server.params, self.device)
            jax.block_until_ready(self.program(params, self.fetched[0]))

    def live(self, x64: bool, precision: Any) -> None:
        """All iterations; a failure is the crew's."""
        try:
            with (
                self.named(),
                jax.enable_x64(x64),
                jax.default_matmul_precision(precision),
            ):
                while (pulled := self.pull()) is not None:
                    snapshot, params = pulled
                    self.push(snapshot, *self.compute(snapshot, params))
        except BaseException as error:
            self.crew.fail(error)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Adds to errors whose they are."""
        try:
            yield
        except BaseException as error:
            error.add_note(
                f"Raised by worker {self.number} of jaxdp.asynchronous.train, in its "
                f"iteration {self.iteration}."
            )
            raise

    def fetch(self) -> PyTree:
        """The batch of this iteration, on this device."""
        return jax.device_put(self.batches(self.number, self.iteration), self.device)

    def pull(self) -> tuple[Snapshot, PyTree] | None:
        """Waits until the next iteration may start; None ends the worker.

        Returns:
            What the server handed out, and a copy on this device.
        """
        crew, began_s, waited = self.crew, self.crew.now(), False
        with crew.turn:
            if not crew.may_go_on(self.number):
                waited = True
                crew.rest(self.number, "waits")
                crew.turn.wait_for(lambda: crew.may_go_on(self.number))
            if crew.failure is not None or crew.has_finished(self.number):
                crew.rest(self.number, "has finished")
                return None
            crew.states[self.number] = "works"
            stamp_s = crew.stamp()
            snapshot = crew.server.pull(self.number)
        self.iteration = snapshot.iteration
        if waited:
            self.log("wait", began_s, stamp_s, -1)
            began_s = stamp_s
        params = jax.block_until_ready(jax.device_put(snapshot.params, self.device))
        self.log("pull", began_s, crew.now(), snapshot.version)
        return snapshot, params

    def compute(self, snapshot: Snapshot, params: PyTree) -> tuple[Mean, PyTree]:
        """The loss and the gradient."""
        began_s = self.crew.now()
        fetched = self.iteration in self.fetched
        batch = self.fetched.pop(self.iteration) if fetched else self.fetch()
        loss, gradients = jax.block_until_ready(self.program(params, batch))
        self.before_push(self.number, self.iteration)
        self.log("compute", began_s, self.crew.now(), snapshot.version)
        return loss, gradients

    def push(self, snapshot: Snapshot, loss: Mean, gradients: PyTree) -> None:
        """Sends the gradient, and wakes whom it lets go on."""
        crew, began_s = self.crew, self.crew.now()
        sent = jax.device_put((gradients, loss), crew.server.device)
        gradients, loss = jax.block_until_ready(sent)
        with crew.turn:
            crew.stamp()
            crew.server.push(self.number, gradients, snapshot, loss)
            crew.turn.notify_all()
        self.log("push", began_s, crew.now(), snapshot.version)

    def log(self, kind: Kind, start_s: float, end_s: float, version: int) -> None:
        """Adds a span."""
        span = Span(self.number, kind, start_s, end_s, self.iteration, version)
        self.spans.append(span)
