"""Rows as tables on the terminal, by rich: imported when a table is shown."""

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
WIDTH = 120  # characters of a table as text


def rich_table(title: str, rows: Rows, caption: str = "") -> Any:
    """A `rich.table.Table`: numbers to the right, and a line between groups.

    Args:
        title: Stands above.
        rows: All with the same columns; the first column makes the groups.
        caption: Stands below.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    style = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    narrow = len(title)  # a title wraps at the width of its table
    shown = Table(title=title, caption=caption or None, min_width=narrow, **style)
    columns = list(rows[0]) if rows else []
    for column in columns:
        number = isinstance(rows[0][column], int | float)
        shown.add_column(column, justify="right" if number else "left", no_wrap=True)
    for i, row in enumerate(rows):
        following = rows[i + 1][columns[0]] if i + 1 < len(rows) else None
        ends = following != row[columns[0]]
        shown.add_row(*(written(row[column]) for column in columns), end_section=ends)
    return shown


def as_text(table: Any) -> str:
    """A rich table as plain text."""
    from rich.console import Console

    console = Console(width=WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def written(value: Any) -> str:
    """A cell: thousands apart, three decimals, markup kept as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value).replace("[", r"\[")
