"""Lets others watch a step: every transfer and program is told to who asked for it.

Nothing is measured here, and without an observer nothing is done. The devices may
still be at work on the arrays of an event when its observers see it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax
from jax.core import Tracer

from jaxdp.replicated.devices import Device

PyTree = Any


class Event(NamedTuple):
    """A transfer or a program, just dispatched.

    Attributes:
        stage: Which of the eight stages it belongs to, such as "4 forward".
        what: What it makes or moves, such as "activations".
        replica: Which replica it serves; None for the device that serves all.
        source: Where a transfer comes from; None is the host. Of a program its device.
        target: Where the results are.
        given: Arrays it waits for.
        made: Results by what they are.
        lower: Gives the program as a `jax.stages.Lowered`; None for a transfer.
        began: `time.perf_counter()` when its dispatch began.
    """

    stage: str
    what: str
    replica: int | None
    source: Device | None
    target: Device
    given: list[jax.Array]
    made: dict[str, list[jax.Array]]
    lower: Callable[[], jax.stages.Lowered] | None
    began: float

    @property
    def nbytes(self) -> int:
        """Bytes that a transfer moves; 0 if they were there already."""
        if self.lower is not None or self.source == self.target:
            return 0
        return sum(
            array.size * array.dtype.itemsize
            for arrays in self.made.values()
            for array in arrays
        )


class Observer(Protocol):
    """Watches what happens inside `observed_by(observer)`."""

    def see(self, event: Event) -> None:
        """Takes note of an event; may wait for its arrays."""
        ...

    def settle(self) -> None:
        """Waits for all it has seen: their arrays may be donated next."""
        ...


_observers: list[Observer] = []


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tells `observer` of all that happens inside the block, on any thread."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
        observer.settle()


def now() -> float:
    """The clock of all events; 0 while nobody watches."""
    return time.perf_counter() if _observers else 0.0


def tell(
    stage: str,
    what: str,
    replica: int | None,
    source: Device | None,
    target: Device,
    given: PyTree,
    made: dict[str, PyTree],
    began: float,
    lower: Callable[[], jax.stages.Lowered] | None = None,
) -> None:
    """Tells all observers; does nothing without any, or under a second `grad`."""
    if not _observers:
        return
    arrays = {name: jax.tree.leaves(tree) for name, tree in made.items()}
    if any(isinstance(a, Tracer) for each in arrays.values() for a in each):
        return
    arrived = [a for a in jax.tree.leaves(given) if isinstance(a, jax.Array)]
    event = Event(stage, what, replica, source, target, arrived, arrays, lower, began)
    for observer in list(_observers):
        observer.see(event)


def settle() -> None:
    """Lets observers finish before arrays are donated."""
    for observer in list(_observers):
        observer.settle()
