"""Which collective of a compiled program carries which of those that were written.

Names do not survive compilation, so this goes by what is moved: the kind, the devices,
the number of elements. Where several are alike, the scope that JAX records decides, and
then the order. What matches in nothing else may still have been replaced by another
kind that does the same work, by the table `REPLACEMENTS`.

The unit is one array of one collective, since XLA combines collectives of several
arrays into one and takes them apart.
"""

import bisect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxdp.program.collective import CollectiveOp
from jaxdp.program.hlo.shapes import Array

_SCOPE = re.compile(r"loss|exchange|rest|parameters|bucket_\d+")
# What may do the work of a kind: kinds, each with the power of the group size that its
# input is larger by. Reduce-scatter as an all-reduce of the same input, for example.
REPLACEMENTS: dict[str, list[list[tuple[str, int]]]] = {
    "all-reduce": [[("reduce-scatter", 0), ("all-gather", -1)], [("all-gather", 0)]],
    "reduce-scatter": [[("all-reduce", 0)], [("all-to-all", 0)]],
    "all-gather": [[("all-reduce", 1)]],
    "all-to-all": [[("all-gather", 0)]],
    "collective-broadcast": [[("all-reduce", 0)], [("all-gather", 0)]],
    "collective-permute": [],
}


@dataclass
class Unit:
    """One array of one collective.

    Attributes:
        op: Number of the collective in its program.
        kind: As of `CollectiveOp`.
        members: Its groups or pairs, in no order.
        array: What a device puts in.
        scope: See `scope_of`.
        combined: Whether the collective has other arrays too.
        left: How many of its runs are not matched yet.
    """

    op: int
    kind: str
    members: frozenset
    array: Array
    scope: str
    combined: bool
    left: int


@dataclass
class Matching:
    """Pairs of numbers of collectives, (written, found), and what is in no pair.

    Attributes:
        pairs: How many runs of which arrays match: `(written, found)` to the arrays.
        combined: Numbers of written collectives, and of the fewer that move as much in
            all, or less, though the text does not tell which carries which.
        replaced: Numbers of written collectives, and of those that do their work.
        missing: Written, and not found.
        added: Found, and not written.
    """

    pairs: dict[tuple[int, int], list[tuple[Array, Array]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    combined: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=list
    )
    replaced: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    missing: tuple[int, ...] = ()
    added: tuple[int, ...] = ()


def scope_of(op: CollectiveOp) -> str:
    """The scopes that jaxdp gave an operation: "exchange/bucket_2"; "" for none."""
    return "/".join(filter(_SCOPE.fullmatch, op.op_name.split("/")))


def match(written: Sequence[CollectiveOp], found: Sequence[CollectiveOp]) -> Matching:
    """Matches the collectives of a traced program with those of the compiled one.

    Collectives that move nothing, on one device or of empty arrays, are left out.
    """
    wanted, given = _units(written), _units(found)
    result = Matching()
    for key in (_alike_in_scope, _alike, _sized_in_scope, _sized):
        _match_by(key, wanted, given, result)
    for unit in given:
        for part in _concatenated(unit, wanted):
            result.pairs[part.op, unit.op].append((part.array, unit.array))
            unit.left = part.left = 0
    result.combined = list(_combined(wanted, given))
    for unit in wanted:
        while unit.left and (others := _replacement(unit, given)):
            result.replaced.append(
                (unit.op, tuple(dict.fromkeys(o.op for o in others)))
            )
            for one in (unit, *others):
                one.left -= 1
    result.missing = tuple(dict.fromkeys(unit.op for unit in wanted if unit.left))
    result.added = tuple(dict.fromkeys(unit.op for unit in given if unit.left))
    return result


def _units(ops: Sequence[CollectiveOp]) -> list[Unit]:
    """The arrays of all collectives that move something."""
    units = []
    for number, op in enumerate(ops):
        members = frozenset(map(frozenset, op.groups)) or frozenset(op.pairs)
        if all(len(set(member)) == 1 for member in op.groups or op.pairs):
            continue
        arrays = [array for array in _whole(op) if array.elements]
        units += [
            Unit(number, op.kind, members, a, scope_of(op), len(arrays) > 1, op.count)
            for a in arrays
        ]
    return units


def _whole(op: CollectiveOp) -> tuple[Array, ...]:
    """The arrays of a collective; the parts of an all-to-all put together."""
    size = len(op.groups[0]) if op.groups else 0
    if op.kind == "all-to-all" and len(op.arrays) == size > 1:
        first = op.arrays[0]
        return (Array(first.dtype, (size, *first.dims), first.bits),)
    return op.arrays


def _alike(unit: Unit) -> tuple:
    return unit.kind, unit.members, unit.array.elements, unit.array.dtype


def _sized(unit: Unit) -> tuple:
    return unit.kind, unit.members, unit.array.elements


# A combined collective has the name of one of its parts: its scope tells nothing.
def _alike_in_scope(unit: Unit) -> tuple | None:
    return None if unit.combined else (*_alike(unit), unit.scope)


def _sized_in_scope(unit: Unit) -> tuple | None:
    return None if unit.combined else (*_sized(unit), unit.scope)


def _match_by(
    key: Callable[[Unit], tuple | None],
    wanted: list[Unit],
    given: list[Unit],
    result: Matching,
) -> None:
    """Pairs units with the same key, in order; a combined one with several scopes."""
    candidates: dict[tuple, list[Unit]] = defaultdict(list)
    for unit in wanted:
        if unit.left and (found := key(unit)) is not None:
            candidates[found].append(unit)
    scopes: dict[int, set[str]] = defaultdict(set)
    for unit in given:
        found = key(unit)
        while unit.left and found is not None and candidates[found]:
            fresh = (o for o in candidates[found] if o.scope not in scopes[unit.op])
            other = next(fresh, candidates[found][0])
            times = min(unit.left, other.left)
            unit.left, other.left = unit.left - times, other.left - times
            if not other.left:
                candidates[found].remove(other)
            scopes[unit.op].add(other.scope)
            result.pairs[other.op, unit.op].append((other.array, unit.array))


def _concatenated(unit: Unit, wanted: list[Unit]) -> list[Unit]:
    """Written arrays in a row that one found array holds, one after the other."""
    alike = [
        other
        for other in wanted
        if other.left == unit.left > 0
        and (other.kind, other.members) == (unit.kind, unit.members)
        and other.array.dtype == unit.array.dtype
    ]
    ends = list(itertools.accumulate((o.array.elements for o in alike), initial=0))
    for first, start in enumerate(ends):
        last = bisect.bisect_left(ends, start + unit.array.elements)
        if last < len(ends) and ends[last] - start == unit.array.elements:
            return alike[first:last]
    return []


def _combined(
    wanted: list[Unit], given: list[Unit]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All that is left of one kind, where fewer are found, and no more elements.

    XLA lays arrays end to end in an order of its own. Of sums that are equal, such as
    the gradients of two biases that are added up, it keeps one.
    """
    sides: dict[tuple, tuple[list[Unit], list[Unit]]] = defaultdict(lambda: ([], []))
    for side, units in enumerate((wanted, given)):
        for unit in units:
            if unit.left:
                key = unit.kind, unit.members, unit.array.dtype
                sides[key][side].append(unit)
    for ours, theirs in sides.values():
        counts = [
            sum(u.left * u.array.elements for u in side) for side in (ours, theirs)
        ]
        if 0 < counts[1] <= counts[0] and len(theirs) < len(ours):
            yield tuple(u.op for u in ours), tuple(u.op for u in theirs)
            for unit in (*ours, *theirs):
                unit.left = 0


def _replacement(unit: Unit, given: list[Unit]) -> list[Unit]:
    """Units left over that together do the work of one; none if there are not."""
    size = len(next(iter(unit.members)))
    for option in REPLACEMENTS[unit.kind]:
        parts = [next(_like(unit, given, *part, size), None) for part in option]
        found = [part for part in parts if part is not None]
        if len(found) == len(option):
            return found
    return _apart(unit, given) if unit.kind == "collective-permute" else []


def _like(
    unit: Unit, given: list[Unit], kind: str, power: int, size: int
) -> Iterator[Unit]:
    """Units of a kind between the same devices; XLA may have padded the array."""
    least = unit.array.elements
    least = -(-least // size) if power < 0 else least * size**power
    for other in given:
        padding = other.array.elements - least
        if other.left and other.kind == kind and other.members == unit.members:
            if 0 <= padding < size:
                yield other


def _apart(unit: Unit, given: list[Unit]) -> list[Unit]:
    """Permutes that have the pairs of one, each some of them."""
    parts, pairs = [], Counter()
    for other in given:
        alike = other.kind == unit.kind and other.array == unit.array
        if other.left and alike and other.members < unit.members:
            if not pairs.keys() & other.members:
                parts.append(other)
                pairs.update(other.members)
    return parts if pairs.keys() == unit.members else []
