"""What a run found, on the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import wording
from benchmarks.changes import Change
from benchmarks.history import Run

STYLES = {"slower": "bold red", "faster": "green", "as before": "", "new": "dim"}
COLUMNS = ("benchmark", "ms", "value", "quartiles", "limit", "change")
CAPTION = "ms: ours, theirs; value: median of ours / theirs, or seconds; less is better"


def show(changes: Sequence[Change], run: Run) -> None:
    """Prints a table, and below it what needs attention."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=CAPTION)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for change in changes:
        row = change.row
        times = [wording.number(ms) for ms in (row.ours_ms, row.theirs_ms)]
        table.add_row(
            row.name,
            ", ".join(filter(None, times)),
            Text(wording.value(row), style="green" if row.holds else "red"),
            wording.quartiles(row),
            wording.limit(row),
            Text(wording.change(change), style=STYLES[change.verdict]),
        )
    console = Console()
    console.print(table)
    for line in warnings(changes, run):
        console.print(Text(line, style="bold red"), soft_wrap=True)


def warnings(changes: Sequence[Change], run: Run) -> list[str]:
    """What became slower, passes its limit or failed: a line each."""
    slower = [
        f"slower: {c.row.name}: {wording.value(c.row)}, usually {wording.usual(c)}, "
        f"by chance up to {wording.bound(c)}, over {c.before} commits"
        for c in changes
        if c.verdict == "slower"
    ]
    passed = [
        f"over its limit: {c.row.name}: {wording.value(c.row)}, limit "
        f"{wording.limit(c.row)}"
        for c in changes
        if not c.row.holds
    ]
    failed = [f"failed: {case['name']}: {case['error']}" for case in run["failed"]]
    return slower + passed + failed
