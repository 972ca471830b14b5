"""Whether the compiler kept a design."""

from typing import Any, NamedTuple


class Verdict(NamedTuple):
    """Whether the compiler kept a design."""

    kept: bool


def verify(report: Any, train: Any, *arguments: Any) -> Verdict:
    """Whether the compiler kept a design."""
    raise NotImplementedError(report, train, arguments)
