"""How names and numbers are written, on the terminal and in the report."""

import re
from typing import Any

UNITS = {"ms": "ms", "us": "µs", "s": "s", "mb": "MiB", "bytes": "bytes"}


def heading(name: str) -> str:
    """A column or table name in words: `sent_bytes` becomes "sent (bytes)"."""
    words, _, unit = name.rpartition("_")
    if words and unit in UNITS:
        return f"{words.replace('_', ' ')} ({UNITS[unit]})"
    return name.replace("_", " ")


def value(given: Any) -> str:
    """A cell: four significant digits, thousands apart, yes or no, and lists of it."""
    if isinstance(given, bool):
        return "yes" if given else "no"
    if isinstance(given, int):
        return f"{given:,}"
    if isinstance(given, float):
        return f"{given:.4g}"
    if isinstance(given, list | tuple):
        return ", ".join(map(value, given))
    return "" if given is None else str(given)


def is_number(given: Any) -> bool:
    """Whether a cell belongs to the right of its column."""
    return isinstance(given, int | float) and not isinstance(given, bool)


def slug(title: str) -> str:
    """A file name: `"Step time, by design"` becomes `step-time-by-design`."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
