"""One benchmark: a name, and a function that measures."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from benchmarks.rows import Row


def nothing() -> str:
    """Nothing is missing."""
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark.

    Attributes:
        name: Of its row; a benchmark of several rows names them itself.
        group: What it is compared with, or what it measures.
        run: `run(name, seconds)` measures for about so many seconds and yields rows.
        missing: Says what is not installed here, with the remedy; empty if all is.
        long: Left out unless all, or this one, is asked for.
    """

    name: str
    group: str
    run: Callable[[str, float], Iterable[Row]]
    missing: Callable[[], str] = nothing
    long: bool = False

    def measured(self, seconds: float) -> Iterator[Row]:
        """Its rows, with the group."""
        for row in self.run(self.name, seconds):
            yield dataclasses.replace(row, group=self.group)
