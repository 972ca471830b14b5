"""What one benchmark measured: a row of the table, of the history and of the page."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, Literal

Unit = Literal["ratio", "s"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One benchmark's result; less is better.

    Attributes:
        name: What is measured; the history knows a benchmark by it.
        unit: "ratio" of two programs that ran in turns, ours / theirs; or "s".
        value: The median, in that unit.
        quartiles: First and third quartile, in that unit.
        repeats: How many runs were counted, of each program.
        limit: What the value must not pass, in that unit; None if nothing is promised.
        ours_ms: Median time of ours; None in rows of seconds.
        theirs_ms: Median time of what it is compared with; None in rows of seconds.
        group: The group of the benchmark.
    """

    name: str
    unit: Unit
    value: float
    quartiles: tuple[float, float]
    repeats: int
    limit: float | None = None
    ours_ms: float | None = None
    theirs_ms: float | None = None
    group: str = ""

    @classmethod
    def of(cls, name: str, unit: Unit, values: Sequence[float], **others: Any) -> "Row":
        """The row of what was measured: its median and quartiles.

        Args:
            name: What is measured.
            unit: Of the values.
            values: At least one.
            **others: Further attributes.
        """
        value, quartiles = _middle(values)
        return cls(
            name=name,
            unit=unit,
            value=value,
            quartiles=quartiles,
            repeats=len(values),
            **others,
        )

    @property
    def holds(self) -> bool:
        """Whether the value keeps to the limit."""
        return self.limit is None or self.value <= self.limit


def _middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median of at least one value, and the first and third quartile."""
    if len(values) == 1:
        return values[0], (values[0], values[0])
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return median, (first, third)
