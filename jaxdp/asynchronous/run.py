"""What an asynchronous run gives back, and what it says about itself."""

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdp.asynchronous.log import Event, Span, verify
from jaxdp.asynchronous.policies import Policy
from jaxdp.asynchronous.server import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PyTree = Any
Curve = Sequence[tuple[int, float, float]]


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        params: The server's parameters at the end.
        opt_state: The optimizer's state at the end.
        policy: Who waited for whom.
        workers: Their number.
        updates: Versions made.
        spans: What the workers did, by start.
        events: What the server did, in its order.
        losses: `(version, time_s, loss)` of every push in order of arrival: the
            worker's own loss, and the version it was computed on.
        evaluations: `(version, time_s, value)` of the server's parameters.
        pushed: Pushes that arrived, per worker: applied + dropped + refused.
        applied: Those that are part of an update, per worker.
        dropped: Those that came too late for their round, per worker.
        refused: Those that were not finite, per worker.
        duration_s: Until the last thing that happened, or until the run was ended.
        events_processed: Events that the simulator took from its queue; 0 for threads.
    """

    params: PyTree = dataclasses.field(repr=False)
    opt_state: PyTree = dataclasses.field(repr=False)
    policy: Policy
    workers: int
    updates: int
    spans: tuple[Span, ...] = dataclasses.field(repr=False)
    events: tuple[Event, ...] = dataclasses.field(repr=False)
    losses: Curve = dataclasses.field(repr=False)
    evaluations: Curve = dataclasses.field(repr=False)
    pushed: tuple[int, ...]
    applied: tuple[int, ...]
    dropped: tuple[int, ...]
    refused: tuple[int, ...]
    duration_s: float
    events_processed: int

    @classmethod
    def collect(
        cls,
        server: Server,
        spans: Sequence[Span],
        duration_s: float,
        *,
        evaluations: Curve = (),
        events_processed: int = 0,
    ) -> "Run":
        """Closes a server, and makes a run of what it and the workers logged."""
        server.close()
        return cls(
            params=server.params,
            opt_state=server.opt_state,
            policy=server.policy,
            workers=len(server.clocks),
            updates=server.version,
            spans=tuple(sorted(spans, key=lambda span: span.start_s)),
            events=tuple(server.events),
            losses=tuple(server.losses),
            evaluations=tuple(evaluations),
            pushed=tuple(server.pushed),
            applied=tuple(server.applied),
            dropped=tuple(server.dropped),
            refused=tuple(server.refused),
            duration_s=duration_s,
            events_processed=events_processed,
        )

    @property
    def staleness(self) -> dict[int, int]:
        """How many applied pushes were so many updates old."""
        ages = Counter(e.staleness for e in self.events if e.kind == "apply")
        return dict(sorted(ages.items()))

    @property
    def utilisation(self) -> np.ndarray:
        """Share of the run that each worker computed: `[workers]`."""
        return self._seconds("compute") / self.duration_s

    @property
    def wait_share(self) -> np.ndarray:
        """Share of the run that the policy made each worker wait: `[workers]`."""
        return self._seconds("wait") / self.duration_s

    @property
    def updates_per_s(self) -> float:
        """Versions made per second."""
        return self.updates / self.duration_s

    @property
    def compute_to_communication(self) -> float:
        """Seconds of computing per second of pull, push and wait, of all workers."""
        others = self._seconds("pull", "push", "wait").sum()
        return float(self._seconds("compute").sum() / others) if others else np.inf

    def table(self) -> list[dict[str, Any]]:
        """A row per worker, for printing."""
        shares = zip(self.utilisation, self.wait_share, strict=True)
        return [
            {
                "worker": worker,
                "pushed": self.pushed[worker],
                "applied": self.applied[worker],
                "dropped": self.dropped[worker],
                "refused": self.refused[worker],
                "computing": float(computing),
                "waiting": float(waiting),
            }
            for worker, (computing, waiting) in enumerate(shares)
        ]

    def verify(self) -> None:
        """Proves the log, as `jaxdp.asynchronous.verify` does, and the counts from it.

        Raises:
            ValueError: Names the first event at fault, or the count.
        """
        verify(self.spans, self.events, self.policy, self.workers)
        counts = {"apply": self.applied, "drop": self.dropped, "refuse": self.refused}
        for kind, count in counts.items():
            logged = Counter(e.worker for e in self.events if e.kind == kind)
            _check_logged(kind, count, [logged[w] for w in range(self.workers)])
        _check_logged("push", self.pushed, np.sum(list(counts.values()), axis=0))

    def draw(
        self, path: str | os.PathLike | None = None, *, until_s: float | None = None
    ) -> "Figure":
        """Draws a lane per worker, and the server's updates above them.

        Args:
            path: Where to save the figure; the suffix chooses the format.
            until_s: Draws the beginning only.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from jaxdp.draw.lanes import draw_lanes

        title = f"{self.policy}, {self.workers} workers"
        return draw_lanes(self.spans, self.events, path, title=title, until_s=until_s)

    def _seconds(self, *kinds: str) -> np.ndarray:
        """Seconds that each worker spent so: `[workers]`."""
        seconds = np.zeros(self.workers)
        for span in self.spans:
            if span.kind in kinds:
                seconds[span.worker] += span.end_s - span.start_s
        return seconds


def _check_logged(kind: str, counted: Sequence[int], logged: Sequence[int]) -> None:
    """Refuses counts that the log does not bear out."""
    for worker, (count, number) in enumerate(zip(counted, logged, strict=True)):
        if count != number:
            raise ValueError(
                f"Run.verify found {count} pushes of worker {worker} counted as "
                f"{kind}. The log has {number}: applied + dropped + refused = pushed. "
                "Take counts and events of one run."
            )
