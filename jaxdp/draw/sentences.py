"""What a round does, and what is true after it, in words."""

import dataclasses
from collections.abc import Sequence

from jaxdp.draw.panels import Arrow, Cell, Panel, outcome, those

Pair = tuple[int, int]
LISTED = 4  # more than so many are not listed, but counted or cut short
DONE = {"add": "added", "replace": "stored"}


def doing(panel: Panel) -> tuple[str, str]:
    """What the round of a panel does.

    Returns:
        Who sends how much to whom; and which chunks those are, or "" where the first
        part says it. Who works a schedule out by hand reads the first part only.
    """
    if not panel.arrows:
        return "Nothing is sent.", ""
    groups: dict[str, list[Arrow]] = {}
    for arrow in panel.arrows:
        groups.setdefault(arrow.op, []).append(arrow)
    sends = [_Sends.of(arrows, panel.cells) for arrows in groups.values()]
    details = [each.detail() for each in sends if not each.alike]
    return (
        _sentence("; ".join(each.short() for each in sends)),
        _sentence("; ".join(details)),
    )


def true_now(before: Panel | None, now: Panel) -> str:
    """What has become true; of the start, if there is no moment before."""
    if before is None:
        return _sentence(f"at the start {_started(now.cells)}")
    return _sentence(f"after {before.title.lower()} {_reached(before, now)}")


@dataclasses.dataclass(frozen=True)
class _Sends:
    """Sends of a round that do the same at their targets."""

    moved: dict[Pair, list[int]]  # chunks by pair
    done: str
    devices: int
    whole: bool  # whether all send all there is

    @classmethod
    def of(cls, arrows: Sequence[Arrow], cells: Sequence[Cell]) -> "_Sends":
        moved: dict[Pair, list[int]] = {}
        for arrow in sorted(arrows, key=lambda a: (a.source, a.target, a.chunk)):
            moved.setdefault((arrow.source, arrow.target), []).append(arrow.chunk)
        whole = all(len(sent) == cells[-1].chunk + 1 for sent in moved.values())
        return cls(moved, DONE[arrows[0].op], cells[-1].device + 1, whole)

    @property
    def alike(self) -> bool:
        """Whether all send the same chunks."""
        first, *others = self.moved.values()
        return all(each == first for each in others)

    def short(self) -> str:
        """Who sends how much to whom."""
        pairs = [*self.moved]
        sources, targets = ({pair[end] for pair in pairs} for end in (0, 1))
        every = sources == targets == {*range(self.devices)} and self.devices > 2
        to = self._neighbours(pairs) if every else ""
        rings = [] if to else _rings(pairs)
        what, many = self.what()
        if rings and all(len(ring) == 2 for ring in rings):
            does = "add" if self.done == "added" else "store"
            partners = _rows(rings, " and ")
            return f"partners {partners} exchange {what}, and {does} what they get"
        if not to and 1 in (len(sources), len(targets)):
            verb = "send" if len(sources) > 1 else "sends"
            text = f"{those(sources)} {verb} {what} to {those(targets)}"
        elif to or (rings and every):
            to = to or f"the next one of its ring ({_rows(rings, '-')})"
            text = f"every device sends {what} to {to}"
        else:
            many = not self.alike or self.whole or many
            what = "whole buffers" if self.whole else "chunks" if many else what
            ways = _cut([f"{a} to {b}" for a, b in pairs])
            text = f"{what} travel{'' if many else 's'} from {ways}"
        return f"{text}, where {'they are' if many else 'it is'} {self.done}"

    def detail(self) -> str:
        """Which chunks those are."""
        ways = [
            f"{_named(sent)} from {source} to {target}"
            for (source, target), sent in self.moved.items()
        ]
        verb = "go" if len(next(iter(self.moved.values()))) > 1 else "goes"
        return _cut([ways[0].replace(" from", f" {verb} from"), *ways[1:]])

    def what(self) -> tuple[str, bool]:
        """How much one sends to another, and whether that is a plural."""
        first, *others = self.moved.values()
        if self.whole:
            return "the whole buffer", False
        if self.alike:
            return _named(first), len(first) > 1
        if any(len(each) != len(first) for each in others):
            return "chunks", True
        return (f"{len(first)} chunks", True) if len(first) > 1 else ("a chunk", False)

    def _neighbours(self, pairs: Sequence[Pair]) -> str:
        """Whom all send to, if it is the same seen from everyone."""
        steps = {(target - source) % self.devices for source, target in pairs}
        if len(pairs) != self.devices * len(steps):
            return ""
        if len(steps) == self.devices - 1:
            return "every other one"
        near = {1: "the next one", self.devices - 1: "the one before it"}
        if steps == {*near}:
            return "both neighbours"
        (step, *more) = steps
        return "" if more else near.get(step, "")


def _started(cells: Sequence[Cell]) -> str:
    """Who holds what at the start."""
    held = [cell for cell in cells if cell.held]
    everything = "every chunk" if cells[-1].chunk else "the whole buffer"
    holders = {cell.device for cell in held}
    if all(cell.share == 1 for cell in cells):
        return "the only device holds everything: there is nothing to send"
    if len(held) == len(cells):
        return f"every device holds its own contribution to {everything}"
    if len(holders) == 1:
        return f"{those(holders)} holds {everything}, and nobody else has any"
    if all(cell.device == cell.chunk for cell in held):
        return "every device holds the chunk of its own number, and no other"
    return f"{those(holders)} hold their own contributions"


def _reached(before: Panel, now: Panel) -> str:
    """What has become true since the moment before."""
    changed = zip(before.cells, now.cells, strict=True)
    new = [cell for old, cell in changed if cell.share == 1 > old.share]
    everything = "every chunk" if now.cells[-1].chunk else "the whole buffer"
    if all(cell.share == 1 for cell in now.cells):
        return f"every device holds {everything} complete"
    if not new:
        most = max(now.cells, key=lambda cell: (cell.share < 1, cell.share))
        of = round(len(most.held) / most.share)
        some = any(cell.share == 1 for cell in now.cells)
        no = "no further chunk is complete" if some else "no chunk is complete yet"
        return f"{no}: partial sums have up to {len(most.held)} of {of} contributions"
    holders = {cell.device for cell in new}
    ended = not now.arrows
    own = all(cell.chunk == cell.device for cell in new)
    if own and (ended or len(holders) > now.cells[-1].device):
        return "every device owns the chunk of its own number complete"
    if ended and len(holders) == 1:
        return f"{those(holders)} holds {everything} complete"
    first = all(cell.share < 1 for cell in before.cells)
    if len(new) > LISTED or (len(holders) > now.cells[-1].device and not first):
        return outcome(now.cells)
    return _complete(new, everything)


def _complete(new: Sequence[Cell], everything: str) -> str:
    """Where which chunks have become complete."""
    where: dict[int, set[int]] = {}
    for cell in new:
        where.setdefault(cell.chunk, set()).add(cell.device)
    parts = []
    for chunk, devices in where.items():
        name = f"chunk {chunk}" if everything == "every chunk" else everything
        verb = "" if parts else "is complete "
        parts.append(f"{name} {verb}on {those(devices)}")
    return _cut(parts)


def _rings(pairs: Sequence[Pair]) -> list[list[int]]:
    """The rings that pairs form; none if they form something else, too."""
    following, rings = dict(pairs), []
    if len(following) < len(pairs) or {*following} != {*following.values()}:
        return []
    while following:
        ring = [min(following)]
        while (target := following.pop(ring[-1])) != ring[0]:
            ring.append(target)
        rings.append(ring)
    return rings


def _rows(rings: Sequence[Sequence[int]], between: str) -> str:
    return _cut([between.join(map(str, ring)) for ring in rings])


def _named(chunks: Sequence[int]) -> str:
    return those(chunks, "chunk")


def _cut(parts: Sequence[str]) -> str:
    """The first of many parts."""
    more = ["and so on"] if len(parts) > LISTED else []
    return ", ".join([*parts[:LISTED], *more])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
