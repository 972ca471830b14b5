"""A report as plain text: one line per collective, then the totals per device."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxdp.program.collective import CollectiveOp

_HEADER = ("kind", "arrays", "bytes", "count", "between", "from")
_CONDITIONAL = "? may not run: the largest branch is counted, an upper bound"


def table(
    collectives: Sequence[CollectiveOp],
    devices: int,
    figures: Mapping[str, tuple[int, ...] | None],
) -> str:
    """Lay out collectives and per-device figures; a figure of None is left out."""
    rows = [_HEADER, *map(_row, collectives)] if collectives else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sizes = _some(len(collectives), "collective"), _some(devices, "device")
    lines = [" on ".join(sizes)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(text.ljust(width) for text, width in cells).rstrip())
    if any(op.conditional for op in collectives):
        lines.append(_CONDITIONAL)
    known = {label: amounts for label, amounts in figures.items() if amounts}
    lines += [f"{label:10}{_spread(amounts)}" for label, amounts in known.items()]
    return "\n".join(lines)


def _row(op: CollectiveOp) -> tuple[str, ...]:
    arrays = [f"{n}x {text}" if n > 1 else text for text, n in _tally(op).items()]
    sizes = sorted({len(group) for group in op.groups})
    between = f"{_some(len(op.groups), 'group')} of {'/'.join(map(str, sizes))}"
    if op.kind == "collective-permute":
        between = _some(len(op.pairs), "pair")
    count = f"{op.count}{'?' if op.conditional else ''}"
    origin = op.op_name or op.name
    return op.kind, " ".join(arrays), str(op.bytes), count, between, origin


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
