"""How values are written, on the terminal and on the page."""

from benchmarks.changes import Change
from benchmarks.rows import Row

UNITS = {"ratio": "", "s": " s"}


def number(given: float | None) -> str:
    """Four digits, or two of a small number; nothing for nothing."""
    if given is None:
        return ""
    if 0 < abs(given) < 0.1:
        return f"{given:.2g}"
    return f"{given:.3f}" if abs(given) < 10 else f"{given:.1f}"


def value(row: Row) -> str:
    """The value with its unit."""
    return _with_unit(row.value, row)


def quartiles(row: Row) -> str:
    """First to third, without the unit."""
    return " to ".join(map(number, row.quartiles))


def limit(row: Row) -> str:
    """The limit with its unit; nothing without one."""
    return "" if row.limit is None else f"{row.limit:g}{UNITS[row.unit]}"


def usual(change: Change) -> str:
    """The median of the commits before, with its unit; nothing for a new row."""
    return _with_unit(change.usual, change.row)


def bound(change: Change) -> str:
    """Above what it counts as slower, with its unit; nothing for a new row."""
    return _with_unit(change.bound, change.row)


def change(change: Change) -> str:
    """By how many percent, and if that is not chance, which way."""
    if change.relative is None:
        return change.verdict
    percent = f"{100 * change.relative:+.1f} %"
    return percent if change.verdict == "as before" else f"{percent} {change.verdict}"


def _with_unit(given: float | None, row: Row) -> str:
    return "" if given is None else number(given) + UNITS[row.unit]
