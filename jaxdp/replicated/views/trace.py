"""What each device did, and when: a record per stage and device.

Programs and transfers are started without waiting, so their ends are seen by threads
that wait for the results. A record starts when it was dispatched, when its inputs were
there, or when the device was free, whichever came last. What a stage compiles counts
into it: trace a step that has run before.
"""

import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxdp.replicated.devices import Device, name
from jaxdp.replicated.observe import Event, observed_by
from jaxdp.replicated.views import tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WATCHERS = 64  # threads, more than a step has programs and transfers under way


class Record(NamedTuple):
    """One transfer or program.

    Attributes:
        stage: Such as "4 forward".
        what: What was moved or made.
        replica: Whose; None for the device that serves all.
        source: Where a transfer came from, such as "cpu:0" or "host"; of a program its
            device.
        target: Where the results are.
        shape: Type and shape of the largest array, such as "float32[16,10]".
        arrays: How many arrays there are.
        nbytes: Bytes moved between devices; 0 for programs and for what was there.
        start_ms: Since the first event.
        duration_ms: Until the results were there.
        is_transfer: Whether it is a transfer.
    """

    stage: str
    what: str
    replica: int | None
    source: str
    target: str
    shape: str
    arrays: int
    nbytes: int
    start_ms: float
    duration_ms: float
    is_transfer: bool

    @property
    def end_ms(self) -> float:
        """When the results were there."""
        return self.start_ms + self.duration_ms


@contextmanager
def tracing() -> Iterator["Trace"]:
    """Records everything that `jaxdp.replicated` does inside the block."""
    with ThreadPoolExecutor(WATCHERS, "jaxdp-trace") as pool:
        trace = Trace(pool)
        with observed_by(trace):
            yield trace


class _Seen(NamedTuple):
    """An event without its arrays, the events it waits for, and its end."""

    event: Event
    is_transfer: bool
    waits_for: list[int]
    end: Future[float]


class Trace:
    """The records of what ran inside `with model.trace() as trace:`."""

    def __init__(self, pool: ThreadPoolExecutor):
        """Starts empty; the pool's threads wait for results."""
        self._pool = pool
        self._seen: list[_Seen] = []
        self._makers: dict[int, tuple[Any, int]] = {}

    def see(self, event: Event) -> None:
        """Has a thread wait for the results."""
        made = [array for arrays in event.made.values() for array in arrays]
        makers = {
            maker for array in event.given if (maker := self._maker(array)) is not None
        }
        end = self._pool.submit(_end, made)
        for array in made:
            self._makers[id(array)] = (weakref.ref(array), len(self._seen))
        light = event._replace(given=[], made=_shapes(event), lower=None)
        self._seen.append(_Seen(light, event.lower is None, sorted(makers), end))

    def settle(self) -> None:
        """Waits for all results."""
        for seen in self._seen:
            seen.end.result()

    @property
    def records(self) -> list[Record]:
        """All records, in the order of dispatch."""
        ends: list[float] = []
        free: dict[Device, float] = {}
        records = []
        for event, is_transfer, waits_for, future in self._seen:
            end = future.result()
            start = max([event.began, *(ends[i] for i in waits_for)])
            if not is_transfer:  # a device runs one program at a time
                start = max(start, free.get(event.target, start))
                free[event.target] = end
            ends.append(end)
            start = min(start, end)
            since = start - self._seen[0].event.began
            times = (1e3 * since, 1e3 * (end - start))
            records.append(_record(event, is_transfer, *times))
        return records

    def moved(self, stage: str | None = None, what: str | None = None) -> int:
        """Bytes moved between devices or from the host.

        Args:
            stage: Of this stage only, such as "3 scatter"; None for all.
            what: Of this kind only, such as "parameters"; None for all.
        """
        return sum(
            record.nbytes
            for record in self.records
            if stage in (None, record.stage) and what in (None, record.what)
        )

    def rows(self) -> list[dict[str, Any]]:
        """The records as rows of a table."""
        return [
            {
                "stage": record.stage,
                "what": record.what,
                "from": record.source,
                "to": record.target if record.is_transfer else "",
                "largest": record.shape,
                "arrays": record.arrays,
                "moved_bytes": record.nbytes,
                "start_ms": record.start_ms,
                "duration_ms": record.duration_ms,
            }
            for record in self.records
        ]

    def table(self) -> Any:
        """The records as a `rich.table.Table`."""
        caption = f"{self.moved():,} bytes moved"
        return tables.rich_table("Stages by device", self.rows(), caption)

    def __str__(self) -> str:
        """The table as text."""
        return tables.as_text(self.table())

    def gantt(self, title: str = "Stages by device", note: str = "") -> "Figure":
        """The records as bars over time, a lane per device.

        Args:
            title: Of the figure.
            note: Below it.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from jaxdp.draw.gantt import draw_gantt

        return draw_gantt(self.records, title=title, note=note)

    def _maker(self, array: Any) -> int | None:
        """The event that made an array."""
        reference, index = self._makers.get(id(array), (None, None))
        return index if reference is not None and reference() is array else None


def _end(made: list[jax.Array]) -> float:
    """Waits for results; tells when they were there."""
    jax.block_until_ready(made)
    return time.perf_counter()


def _shapes(event: Event) -> dict[str, list[Any]]:
    """The results without their memory."""
    return {
        what: [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        for what, arrays in event.made.items()
    }


def _record(
    event: Event, is_transfer: bool, start_ms: float, duration_ms: float
) -> Record:
    arrays = [array for made in event.made.values() for array in made]
    return Record(
        event.stage,
        event.what,
        event.replica,
        name(event.source),
        name(event.target),
        _largest(arrays),
        len(arrays),
        event.nbytes if is_transfer else 0,
        start_ms,
        duration_ms,
        is_transfer,
    )


def _largest(arrays: list[Any]) -> str:
    """Type and shape of the largest array."""
    if not arrays:
        return ""
    largest = max(arrays, key=lambda array: array.size)
    return f"{largest.dtype}[{','.join(map(str, largest.shape))}]"
