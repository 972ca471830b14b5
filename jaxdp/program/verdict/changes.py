"""What became of written collectives: each change is a finding, in a sentence."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from jaxdp.program.collective import CollectiveOp
from jaxdp.program.verdict.matching import Matching, match, scope_of

MERGING = frozenset({"merged", "split", "replaced"})


@dataclass(frozen=True)
class Finding:
    """One difference between the written and the compiled program.

    Attributes:
        kind: "merged", "split", "replaced", "missing", "added", "retyped", or
            "unconditional" for what was written in a branch and always runs.
        text: A sentence about it.
        broken: Whether it breaks what the design promises.
        written: The collectives as written.
        found: Those of the compiled program.
    """

    kind: str
    text: str
    broken: bool
    written: tuple[CollectiveOp, ...] = ()
    found: tuple[CollectiveOp, ...] = ()


def find(
    written: Sequence[CollectiveOp],
    found: Sequence[CollectiveOp],
    allowed: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Compares the collectives of a traced and a compiled program.

    Args:
        written: Of the traced program.
        found: Of the compiled one.
        allowed: Kinds of findings that break nothing.

    Returns:
        The findings; those of one kind about the same buckets are one.
    """
    groups: dict[tuple, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for kind, ours, theirs in _changes(match(written, found), written, found):
        labels = frozenset(label(written[w]) for w in ours)
        kinds = tuple(dict.fromkeys(found[f].kind for f in theirs))
        group = groups[kind, labels, kinds]
        group[0].extend(w for w in ours if w not in group[0])
        group[1].extend(f for f in theirs if f not in group[1])
    return tuple(
        _finding(kind, *group, written, found, allowed)
        for (kind, *_), group in groups.items()
    )


def label(op: CollectiveOp) -> str:
    """What a collective is for: its bucket, as `train.buckets` numbers it; or "" ."""
    return scope_of(op).removeprefix("exchange/")


def _changes(
    matching: Matching, written: Sequence[CollectiveOp], found: Sequence[CollectiveOp]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Kind of change, numbers of the written and of the found collectives."""
    carries: dict[int, list[int]] = defaultdict(list)
    carried: dict[int, list[int]] = defaultdict(list)
    for (w, f), arrays in matching.pairs.items():
        carries[f].append(w)
        carried[w].append(f)
        if any(ours.bits != theirs.bits for ours, theirs in arrays):
            yield "retyped", (w,), (f,)
        if written[w].conditional and not found[f].conditional:
            yield "unconditional", (w,), (f,)
    for f, ours in carries.items():
        if len(ours) > 1 and _holds_several(f, ours, matching):
            yield "merged", tuple(ours), (f,)
    yield from (("merged", ours, theirs) for ours, theirs in matching.combined)
    for w, theirs in carried.items():
        if len(theirs) > 1 and len(written[w].arrays) > 1:
            yield "split", (w,), tuple(theirs)
    for w, theirs in matching.replaced:
        apart = written[w].kind == found[theirs[0]].kind
        yield "split" if apart else "replaced", (w,), theirs
    yield from (("missing", (w,), ()) for w in matching.missing)
    yield from (("added", (), (f,)) for f in matching.added)


def _holds_several(f: int, ours: Sequence[int], matching: Matching) -> bool:
    """Whether one run carries several, and not one after the other in a loop."""
    pairs = [pair for w in ours for pair in matching.pairs[w, f]]
    return len({id(theirs) for _, theirs in pairs}) > 1 or any(
        theirs.elements > own.elements for own, theirs in pairs
    )


def _finding(
    kind: str,
    ours: Sequence[int],
    theirs: Sequence[int],
    written: Sequence[CollectiveOp],
    found: Sequence[CollectiveOp],
    allowed: Collection[str],
) -> Finding:
    """One finding, judged and put in words."""
    mine = tuple(written[w] for w in sorted(ours))
    others = tuple(found[f] for f in sorted(theirs))
    broken = kind not in allowed
    # What the loss itself sends is no part of the design.
    if mine and all(label(op) == "loss" for op in mine):
        broken = False
    if kind == "merged":
        own = {label(written[w]) or str(w) for w in ours}
        broken = broken and len(own) > 1
    return Finding(kind, _text(kind, mine, others), broken, mine, others)


def _text(
    kind: str, written: tuple[CollectiveOp, ...], found: tuple[CollectiveOp, ...]
) -> str:
    """The sentence of a finding."""
    ours, theirs = f"{_count(written)}{_of(written)}", _count(found)
    if kind == "retyped":
        dtypes = _dtypes(written), _dtypes(found)
        sizes = sum(op.bytes for op in written), sum(op.bytes for op in found)
        return (
            f"{ours} written as {dtypes[0]} travel as {dtypes[1]}: {sizes[1]} bytes "
            f"for {sizes[0]}"
        )
    if kind == "added":
        return f"{theirs} that nobody wrote: {_bytes(found)} bytes"
    if kind == "missing":
        return f"{ours}, {_bytes(written)} bytes, absent from the compiled program"
    if kind == "unconditional":
        return f"{ours} written in a branch run in every step"
    verb = {"merged": "travel as", "split": "cut into", "replaced": "became"}[kind]
    return f"{ours}, {_bytes(written)} bytes, {verb} {theirs}, {_bytes(found)} bytes"


def _count(ops: Sequence[CollectiveOp]) -> str:
    """How many operations of which kinds: "2 all-reduce + 1 all-gather"."""
    kinds = [op.kind for op in ops]
    return " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _of(ops: Sequence[CollectiveOp]) -> str:
    labels = dict.fromkeys(label(op) for op in ops)
    named = [name for name in labels if name]
    return f" of {', '.join(named)}" if named else ""


def _dtypes(ops: Sequence[CollectiveOp]) -> str:
    return "/".join(dict.fromkeys(dtype for op in ops for dtype in op.dtypes))


def _bytes(ops: Sequence[CollectiveOp]) -> int:
    return sum(op.bytes for op in ops)
