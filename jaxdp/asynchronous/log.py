"""The log of a run, and the proof from it that no gradient was lost, doubled or torn.

Workers log *spans*, the server logs *events*, in its own order. `verify` replays the
events with counters of its own: it shares no code with the policies and the server.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from jaxdp.asynchronous.policies import Backup, Bounded, Policy, Sequential


class Span(NamedTuple):
    """What a worker does for a while.

    Attributes:
        worker: Its number.
        kind: It waits for others, pulls parameters, computes a gradient, has stopped
            inside a computation, or pushes.
        start_s: Seconds since the run began.
        end_s: Likewise.
        iteration: For which iteration.
        version: Of the parameters it pulls or uses; -1 while it waits.
    """

    worker: int
    kind: Literal["wait", "pull", "compute", "stopped", "push"]
    start_s: float
    end_s: float
    iteration: int
    version: int


class Event(NamedTuple):
    """What the server does at once.

    Attributes:
        time_s: Seconds since the run began.
        kind: "read" hands out parameters; "apply", "drop" and "refuse" are what becomes
            of a push.
        worker: Whose pull or push.
        iteration: Of that worker.
        version: "read": the version handed out. "apply": the version made by the update
            that holds the push. Else the version that the server has.
        staleness: "apply": how many updates came between pull and apply; else 0.
    """

    time_s: float
    kind: Literal["read", "apply", "drop", "refuse"]
    worker: int
    iteration: int
    version: int
    staleness: int


def verify(
    spans: Sequence[Span], events: Sequence[Event], policy: Policy, workers: int
) -> None:
    """Proves that a log is one of a sound run.

    - Every push ends as exactly one of apply, drop and refuse: none is lost or doubled.
    - Versions made are 1, 2, 3 ... without a gap, each of as many pushes as the policy
      says, with nothing in between: no update is torn.
    - A read hands out the version made by the applies before it, no other, and not
      before the policy lets it: under `Bounded(s)` iteration `t` never runs on
      parameters that lack a push of an iteration up to `t - 1 - s`.
    - Every staleness is what reads and applies say.
    - The spans of a worker do not overlap and follow pull, compute, push. Time never
      runs backwards.

    Args:
        spans: Of each worker in order.
        events: In the server's order.
        policy: Who waited for whom.
        workers: Their number.

    Raises:
        ValueError: Names the first event, or else the first span, at fault.
    """
    replay = _Replay(policy, workers)
    for index, event in enumerate(events):
        if fault := replay.fault(event):
            raise _error(f"event {index}, {event}", fault)
    if fault := replay.torn():
        raise _error("a log that ends early", fault)
    settled = {(e.worker, e.iteration): e for e in events if e.kind != "read"}
    reads = {(e.worker, e.iteration, e.version): e for e in events if e.kind == "read"}
    lanes = [_Lane() for _ in range(workers)]
    for span in spans:
        if not 0 <= span.worker < workers:
            raise _error(f"{span}", f"There are {workers} workers")
        if fault := lanes[span.worker].fault(span, reads, settled):
            raise _error(f"{span}", fault)
    if settled:
        raise _error(f"{next(iter(settled.values()))}", "No span is its push")


def _error(where: str, fault: str) -> ValueError:
    return ValueError(
        f"verify got {where}. {fault}. Pass the spans and events of one run, as logged."
    )


class _Replay:
    """The server's events once more, with counters of its own."""

    def __init__(self, policy: Policy, workers: int):
        self.in_rounds = isinstance(policy, Sequential | Backup)
        self.skips_rounds = isinstance(policy, Backup)
        self.bound = policy.max_staleness if isinstance(policy, Bounded) else None
        late = policy.extra if isinstance(policy, Backup) else 0
        self.round_size = workers - late if self.in_rounds else 1
        self.time_s = float("-inf")
        self.version = self.rounds = 0
        self.arrived = 0  # pushes of the open round that are settled
        self.making = self.closed = False
        self.done = [0] * workers
        self.pulled: dict[int, tuple[int, set[int]]] = {}  # iteration, versions read

    def fault(self, event: Event) -> str:
        """What is wrong with the next event; empty if nothing is."""
        if not 0 <= event.worker < len(self.done):
            return f"There are {len(self.done)} workers"
        if not event.time_s >= self.time_s:
            return f"The one before is of {self.time_s} s"
        if self.making and (event.kind, event.version) != ("apply", self.version):
            return self.torn()
        if self.making and event.time_s != self.time_s:
            return self.torn()
        if self.closed and event.kind != "drop":
            return "The run was over, since pushes of an open round were dropped"
        self.time_s = event.time_s
        if event.kind != "apply" and (event.version, event.staleness) != (
            self.version,
            0,
        ):
            return f"The server had version {self.version}, and staleness is of applies"
        if event.kind == "read":
            return self._read(event)
        return self._settle(event)

    def torn(self) -> str:
        """What an update that has begun lacks."""
        if not self.making:
            return ""
        return (
            f"The update to version {self.version} has {self.arrived} of its "
            f"{self.round_size} pushes, and all must be applied at once"
        )

    def _read(self, event: Event) -> str:
        iteration, versions = self.pulled.get(event.worker, (-1, set()))
        expected = self.done[event.worker]
        if self.skips_rounds:
            expected = max(expected, self.rounds)
        if event.iteration != expected:
            return f"The worker's next iteration was {expected}"
        if self.in_rounds and event.iteration > self.rounds:
            return f"Round {self.rounds} had not ended"
        for worker, done in enumerate(self.done):
            if self.bound is not None and done < event.iteration - self.bound:
                return (
                    f"Worker {worker} had finished {done} iterations, and at most "
                    f"{self.bound} may be missing to {event.iteration}"
                )
        fresh = versions if iteration == event.iteration else set()
        self.pulled[event.worker] = (event.iteration, fresh | {event.version})
        return ""

    def _settle(self, event: Event) -> str:
        iteration, versions = self.pulled.pop(event.worker, (None, set()))
        if iteration != event.iteration:
            return "The worker has no pull of this iteration that is not pushed yet"
        self.done[event.worker] = event.iteration + 1
        if event.kind == "apply":
            fault = self._apply(event, versions)
        else:
            fault = self._drop(event) if event.kind == "drop" else ""
        counts = self.in_rounds and event.iteration == self.rounds
        if not fault and (counts or event.kind == "apply"):
            self.arrived += 1
            if self.arrived == self.round_size:
                self.rounds, self.arrived, self.making = self.rounds + 1, 0, False
                if self.closed:
                    return "The round was complete, and an update due"
        return fault

    def _apply(self, event: Event, versions: set[int]) -> str:
        if not self.making:
            self.making, self.version = True, self.version + 1
        if event.version != self.version:
            return f"The next update makes version {self.version}"
        ages = sorted(self.version - 1 - version for version in versions)
        if event.staleness not in ages:
            return f"Its parameters were {ages[-1]} updates old"
        if self.in_rounds and event.iteration != self.rounds:
            return f"The open round is {self.rounds}"
        return ""

    def _drop(self, event: Event) -> str:
        if self.skips_rounds and event.iteration < self.rounds:
            return ""
        self.closed = True
        return "" if self.in_rounds else "This policy drops nothing"


class _Lane:
    """The spans of one worker."""

    FOLLOWS: ClassVar = {
        "wait": {"push", None},
        "pull": {"wait", "push", None},
        "compute": {"pull", "stopped"},
        "stopped": {"pull", "compute", "stopped"},
        "push": {"compute"},
    }

    def __init__(self):
        self.last: Span | None = None

    def fault(self, span: Span, reads: dict, settled: dict) -> str:
        """What is wrong with the worker's next span; takes its push from `settled`."""
        last, self.last = self.last, span
        if span.kind not in self.FOLLOWS:
            return f"Its kind must be one of {', '.join(self.FOLLOWS)}"
        kind, end_s = (last.kind, last.end_s) if last else (None, float("-inf"))
        if kind not in self.FOLLOWS[span.kind]:
            return f"It follows a {kind}"
        if not end_s <= span.start_s <= span.end_s:
            return f"The span before it ends at {end_s} s"
        if last and (
            span.iteration <= last.iteration
            if kind == "push"
            else span.iteration != last.iteration
        ):
            return f"It follows a {kind} of iteration {last.iteration}"
        if span.kind == "pull":
            read = reads.get((span.worker, span.iteration, span.version))
            if not read or not span.start_s <= read.time_s <= span.end_s:
                return "Meanwhile the server handed out nothing such"
        elif span.kind != "wait" and last and last.version != span.version:
            return f"The span before it used version {last.version}"
        return self._push(span, settled) if span.kind == "push" else ""

    def _push(self, span: Span, settled: dict) -> str:
        event = settled.pop((span.worker, span.iteration), None)
        if event is None or event.time_s < span.start_s:
            return "The server settled no such push"
        made_on = event.version - 1 - event.staleness
        if event.kind == "apply" and made_on != span.version:
            return f"The server applied a push of version {made_on}"
        return ""
