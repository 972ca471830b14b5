"""Tables and progress on the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from experiments.harness import wording
from experiments.harness.result import Document, Rows

COLOURS = {"holds": "green", "partly": "yellow", "refuted": "red"}
EMPHASIS = {"all": "bold red", "no": "bold red"}  # "all": a chunk that is complete
MOST_ROWS = 40  # of a table on the terminal
FEW_ROWS = 6  # of a table that may be turned, so that it fits
WIDEST = 20  # characters of a cell that are kept on one line
console = Console()


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; the function it gives advances it by one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


def table(name: str, rows: Rows) -> None:
    """Prints rows, in groups by the first column; a column `label` goes below."""
    columns, caption = split_label(rows)
    if len(rows) > MOST_ROWS:
        caption = f"and {len(rows) - MOST_ROWS} rows more in result.json"
        rows = rows[:MOST_ROWS]
    apart = len({row[columns[0]] for row in rows}) == len(rows)
    if len(rows) <= FEW_ROWS and apart and not _fits(columns, rows):
        columns, rows = turned(columns, rows)
    fits = _fits(columns, rows)
    style = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "show_edge": False}
    shown = Table(title=wording.heading(name), caption=caption, **style)
    for column in columns:
        longest = max(len(wording.value(row[column])) for row in rows)
        right = any(wording.is_number(row[column]) for row in rows)
        shown.add_column(
            wording.heading(column),
            justify="right" if right else "left",
            overflow="fold",
            min_width=_width(column, rows) if fits else None,
            no_wrap=not right and longest <= WIDEST,  # headings wrap instead
        )
    first = [row[columns[0]] for row in rows]
    grouped = len(set(first)) < len(first)
    for row, here, following in zip(rows, first, [*first[1:], None], strict=True):
        texts = [wording.value(row[column]) for column in columns]
        cells = [Text(text, style=EMPHASIS.get(text, "")) for text in texts]
        shown.add_row(*cells, end_section=grouped and here != following)
    console.print(shown)
    console.print()


def turned(columns: list[str], rows: Rows) -> tuple[list[str], Rows]:
    """The table with a column for every row: few rows of many numbers fit so."""
    first, *others = columns
    names = [f"{wording.value(row[first])}" for row in rows]
    kept = [
        {first: wording.heading(column)}
        | {name: row[column] for name, row in zip(names, rows, strict=True)}
        for column in others
    ]
    return [first, *names], kept


def _fits(columns: list[str], rows: Rows) -> bool:
    """Whether all columns have room beside each other, three spaces apart."""
    return sum(_width(column, rows) + 3 for column in columns) <= console.width + 3


def _width(column: str, rows: Rows) -> int:
    """How broad a column is if the words of its heading and short cells stay whole."""
    cells = [wording.value(row[column]) for row in rows]
    whole = [cell for cell in cells if len(cell) <= WIDEST]
    return max(map(len, [*wording.heading(column).split(), *whole]))


def claims(document: Document) -> None:
    """Prints the claims with their verdicts."""
    for claim in document["claims"]:
        verdict, unit = claim["verdict"], claim["unit"]
        expected, measured = map(wording.value, (claim["expected"], claim["measured"]))
        line = Text.assemble(
            (f"{claim['id']:5}", "bold"),
            (f"{verdict:8}", f"bold {COLOURS[verdict]}"),
            f"expected {expected}, measured {measured} {unit}",
        )
        console.print(line)
        console.print(Padding(Text(claim["claim"], style="dim"), (0, 0, 1, 5)))


def split_label(rows: Rows) -> tuple[list[str], str | None]:
    """The columns of a table, and what stands below it."""
    columns = dict.fromkeys(column for row in rows for column in row)
    columns.pop("label", None)
    return [*columns], rows[0].get("label") if rows else None
