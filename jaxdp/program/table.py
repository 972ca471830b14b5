"""A report as plain text: a line per kind of collective, then the totals."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxdp.program.collective import CollectiveOp

_HEADER = ("kind", "dtype", "arrays", "bytes", "count", "between", "from")
_CONDITIONAL = "? may not run: the largest branch is counted, an upper bound"


def table(
    collectives: Sequence[CollectiveOp],
    devices: int,
    figures: Mapping[str, tuple[int, ...] | None],
    link_bytes: Mapping[tuple[int, int], int],
    rounds: int | None,
) -> str:
    """Lay out collectives and totals; a figure of None is left out.

    Args:
        collectives: what a program runs. Those that differ in nothing but their place
            share a line, which has the count of all.
        devices: how many run it.
        figures: bytes by device, by what they are called.
        link_bytes: by (source, target); the busiest is shown.
        rounds: on the critical path.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for op in collectives:
        counts[_cells(op)] += op.count
    rows = [_HEADER, *(_row(cells, n) for cells, n in counts.items())] if counts else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sizes = _some(len(collectives), "collective"), _some(devices, "device")
    lines = [" on ".join(sizes)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(text.ljust(width) for text, width in cells).rstrip())
    if any(op.conditional for op in collectives):
        lines.append(_CONDITIONAL)
    totals = {label: _spread(each) for label, each in figures.items() if each}
    if link_bytes:
        busiest = max(sorted(link_bytes), key=lambda link: link_bytes[link])
        totals["link"] = (
            f"{link_bytes[busiest]} B at most, from device {busiest[0]} to {busiest[1]}"
        )
    if rounds is not None:
        totals["rounds"] = f"{rounds} on the critical path"
    return "\n".join([*lines, *(f"{label:10}{text}" for label, text in totals.items())])


def _cells(op: CollectiveOp) -> tuple[str, ...]:
    """The cells of a line but for the count, and whether it is an upper bound."""
    arrays = [f"{n}x {text}" if n > 1 else text for text, n in _tally(op).items()]
    sizes = sorted({len(group) for group in op.groups})
    between = f"{_some(len(op.groups), 'group')} of {'/'.join(map(str, sizes))}"
    if op.kind == "collective-permute":
        between = _some(len(op.pairs), "pair")
    may = "?" if op.conditional else ""
    dtypes, origin = " ".join(op.dtypes), op.op_name or op.name
    return op.kind, dtypes, " ".join(arrays), str(op.bytes), may, between, origin


def _row(cells: tuple[str, ...], count: int) -> tuple[str, ...]:
    return (*cells[:4], f"{count}{cells[4]}", *cells[5:])


def _some(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _tally(op: CollectiveOp) -> Counter[str]:
    return Counter(str(array) for array in op.arrays)


def _spread(amounts: tuple[int, ...]) -> str:
    """One number if all devices agree; else the extremes, and who has the most."""
    low, high = min(amounts), max(amounts)
    if low == high:
        return f"{high} B by every device"
    return f"{low} to {high} B, the most by device {amounts.index(high)}"
