"""The threads of a run: what they share, and what each of them does.

A worker's thread pulls by copying the server's parameters to its device, computes
there, and pushes by copying the gradient back. One lock is held around every call of
the server, and one condition wakes those who wait for others' pushes.

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

from jaxdp.asynchronous.errors import deadlock
from jaxdp.asynchronous.log import Span
from jaxdp.asynchronous.policies import Policy
from jaxdp.asynchronous.server import Server, Snapshot
from jaxdp.loss import Mean

PyTree = Any
INTERRUPTIBLE_S = 0.2
Kind = Literal["wait", "pull", "compute", "push"]


class Crew:
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
        """Makes the server; nobody works yet."""
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

    def run(self, members: Sequence["Worker"]) -> None:
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
                self.fail(deadlock(self.server, "train", self.states))


@dataclasses.dataclass
class Worker:
    """A worker; its methods run in its thread.

    Attributes:
        iteration: What it is at.
        fetched: Batches that were fetched before their time.
        spans: Its log.
    """

    crew: Crew
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
