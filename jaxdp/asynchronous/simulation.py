"""The virtual clock: an event-driven simulation of workers around a server.

The queue holds what is under way: computations that will end and pushes that will
arrive, at most one per worker. Taking the next moves the clock. A worker that may start
pulls at once: the server reads its parameters in that instant, and JAX computes the
gradient on exactly those, while virtual time says when it will be there. Ties are
served in the order in which they were queued, so that a seed decides everything.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.asynchronous.errors import deadlock
from jaxdp.asynchronous.log import Span
from jaxdp.asynchronous.run import Run
from jaxdp.asynchronous.server import Server, Snapshot
from jaxdp.asynchronous.times import ComputeTime, Direction, Link, intervals
from jaxdp.loss import Mean

PyTree = Any
PATIENCE = 100  # pushes per worker without an update, until a run has diverged


@dataclasses.dataclass
class Clock:
    """Virtual time."""

    now_s: float = 0.0


class Worker:
    """One worker, and what it does at the moment.

    Attributes:
        doing: Spans that have not ended; several when a computation is stopped.
        asked_s: When it asked for its next iteration.
        snapshot: What it pulled last.
        result: Loss and gradient that are not pushed yet.
    """

    def __init__(self, number: int, device: Any, times: ComputeTime, seed: int):
        """Makes a worker that asks for its first iteration."""
        self.number = number
        self.device = device
        self.times = times
        self.random = np.random.default_rng([seed, number])
        self.doing: list[Span] = []
        self.asked_s = 0.0
        self.snapshot: Snapshot | None = None
        self.result: tuple[Mean, PyTree] | None = None


class End(NamedTuple):
    """When a run ends: at whichever comes first."""

    iterations: int | None
    updates: int | None
    until_s: float | None

    @property
    def is_distant(self) -> bool:
        """Whether only updates end the run, which may never be made."""
        return self.iterations is None and self.until_s is None


@dataclasses.dataclass
class Measure:
    """Evaluates some versions."""

    evaluate: Callable[[PyTree], Any] | None
    every: int
    values: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)

    def __call__(self, server: Server, last: bool = False) -> None:
        """Evaluates the current version, if it is due and was not evaluated yet."""
        due = last or server.version % self.every == 0
        known = self.values and self.values[-1][0] == server.version
        if self.evaluate is not None and due and not known:
            value = float(self.evaluate(server.params))
            self.values.append((server.version, server.now(), value))


class Simulation:
    """A server, its workers, and the queue of what will end when."""

    def __init__(
        self,
        clock: Clock,
        server: Server,
        links: Sequence[Link],
        workers: Sequence[Worker],
        program: Callable[[PyTree, PyTree], tuple[Mean, PyTree]],
        batches: Callable[[int, int], PyTree],
        measure: Measure,
    ):
        """Takes a server that reads the same clock."""
        self.clock, self.server, self.workers = clock, server, workers
        self.program, self.batches, self.measure = program, batches, measure
        message_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(server.params))
        self.pulls = Direction(links, message_bytes)
        self.pushes = Direction(links, message_bytes)
        self.queue: list[tuple[float, int, int]] = []  # time, ticket, worker
        self.tickets = itertools.count()
        self.asking = list(workers)
        self.spans: list[Span] = []
        self.processed = self.fruitless = 0

    def run(self, end: End) -> Run:
        """Runs to the end."""
        self.end = end
        self.measure(self.server)
        self.loop()
        self.measure(self.server, last=True)
        self.cut()
        return Run.collect(
            self.server,
            self.spans,
            self.clock.now_s,
            evaluations=self.measure.values,
            events_processed=self.processed,
        )

    def loop(self) -> None:
        """Takes what ends next, until the run ends or nothing is under way."""
        _, updates, until_s = self.end
        self.release()
        while self.queue:
            time_s, _, number = heapq.heappop(self.queue)
            if until_s is not None and time_s > until_s:
                self.clock.now_s = until_s
                return
            self.clock.now_s = time_s
            self.processed += 1
            self.advance(self.workers[number])
            if updates is not None and self.server.version >= updates:
                return
            self.release()
        if self.asking or self.end.is_distant:
            states = [self.state(worker) for worker in self.workers]
            raise deadlock(self.server, "simulate", states)

    def advance(self, worker: Worker) -> None:
        """What a worker did has ended: it pushes its gradient, or the push is there."""
        ended, worker.doing = worker.doing, []
        self.spans += ended
        last = ended[-1]
        if last.kind == "push":
            self.arrive(worker)
            return
        arrives_s = self.pushes.send(self.clock.now_s)
        push = last._replace(kind="push", start_s=self.clock.now_s, end_s=arrives_s)
        self.do(worker, [push])

    def arrive(self, worker: Worker) -> None:
        """The server takes a push; the worker asks for its next iteration."""
        assert worker.result is not None and worker.snapshot is not None
        before = self.server.version
        loss, gradients = worker.result
        worker.result = None
        self.server.push(worker.number, gradients, worker.snapshot, loss)
        worker.asked_s = self.clock.now_s
        self.asking.append(worker)
        if self.server.version > before:
            self.fruitless = 0
            self.measure(self.server)
            return
        self.fruitless += 1
        patience = PATIENCE * len(self.workers)
        if self.end.is_distant and self.fruitless >= patience:
            raise self.diverged()

    def release(self) -> None:
        """Lets all start that may, in the order in which they asked."""
        asking, self.asking = self.asking, []
        limit = self.end.iterations
        for worker in asking:
            if limit is not None and self.server.next_iteration(worker.number) >= limit:
                continue
            if self.server.waits_for(worker.number):
                self.asking.append(worker)
            else:
                self.start(worker)

    def start(self, worker: Worker) -> None:
        """Pulls, and computes the gradient that the worker will be busy with."""
        number, now_s = worker.number, self.clock.now_s
        snapshot = worker.snapshot = self.server.pull(number)
        iteration, version = snapshot.iteration, snapshot.version
        if now_s > worker.asked_s:
            wait = Span(number, "wait", worker.asked_s, now_s, iteration, -1)
            self.spans.append(wait)
        batch = self.batches(number, iteration)
        given = jax.device_put((snapshot.params, batch), worker.device)
        worker.result = self.program(*given)
        arrives_s = self.pulls.send(now_s)
        pull = Span(number, "pull", now_s, arrives_s, iteration, version)
        computing = [
            pull._replace(kind=kind, start_s=start_s, end_s=end_s)
            for kind, start_s, end_s in intervals(
                worker.times, arrives_s, worker.random
            )
        ]
        self.do(worker, [pull, *computing])

    def do(self, worker: Worker, spans: list[Span]) -> None:
        """Queues the end of what a worker begins, unless it never ends."""
        worker.doing = spans
        end_s = spans[-1].end_s
        if end_s < math.inf:
            entry = (end_s, next(self.tickets), worker.number)
            heapq.heappush(self.queue, entry)

    def cut(self) -> None:
        """Logs what has not ended, up to now; a push under way never was one."""
        for worker in self.workers:
            self.spans += [
                span._replace(end_s=min(span.end_s, self.clock.now_s))
                for span in worker.doing
                if span.kind != "push" and span.start_s < self.clock.now_s
            ]
        for worker in self.asking:
            if self.clock.now_s > worker.asked_s:
                iteration = self.server.next_iteration(worker.number)
                times = worker.asked_s, self.clock.now_s
                self.spans.append(Span(worker.number, "wait", *times, iteration, -1))

    def state(self, worker: Worker) -> str:
        """What a worker does when nothing is under way."""
        if worker.doing:
            last = worker.doing[-1]
            return f"stopped at {last.start_s:.6g} s for ever"
        return "waits" if worker in self.asking else "has finished"

    def diverged(self) -> RuntimeError:
        """The error for a run that would never end."""
        return RuntimeError(
            f"simulate got {self.fruitless} pushes in a row without an update, and "
            f"made {self.server.version} of {self.end.updates} updates. Refused, per "
            f"worker: {self.server.refused}. Gradients must be finite, so the run has "
            "diverged. Lower the learning rate, or end the run by iterations= as well."
        )
