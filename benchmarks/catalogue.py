"""All benchmarks, and the choice among them."""

import fnmatch
from collections.abc import Sequence

from benchmarks import (
    analysis,
    checking,
    compiling,
    exchanges,
    importing,
    rivals,
    steps,
)
from benchmarks.case import Case

MODULES = (exchanges, steps, checking, analysis, importing, rivals, compiling)


def every() -> tuple[Case, ...]:
    """All benchmarks, in the order in which they run."""
    return tuple(case for module in MODULES for case in module.cases())


def chosen(cases: Sequence[Case], only: str = "", every: bool = False) -> list[Case]:
    """The benchmarks that are asked for.

    Args:
        cases: To choose from.
        only: Part of `GROUP: NAME`, in any case; `*` stands for anything. Empty for all
            that are not long.
        every: The long ones, too.

    Raises:
        ValueError: No name contains it; all names are listed.
    """
    if not only:
        return [case for case in cases if every or not case.long]
    pattern = f"*{only.lower()}*"
    names = {case: f"{case.group}: {case.name}" for case in cases}
    found = [c for c in cases if fnmatch.fnmatchcase(names[c].lower(), pattern)]
    if not found:
        listed = "\n  ".join(names.values())
        raise ValueError(
            f"--only got {only!r}, and no benchmark is called so. It must be part of "
            f"one of these names, where * stands for anything:\n  {listed}"
        )
    return found
