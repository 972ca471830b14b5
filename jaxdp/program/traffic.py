"""Bytes each device sends and receives in one run of a collective.

A permute says exactly what moves. For the other kinds XLA leaves the algorithm to the
runtime, so these are the *bandwidth-optimal* figures, those of a ring, which nccl-tests
uses for its bus bandwidth too. With `n` devices in a group and `B` bytes of the full
array (see `CollectiveOp.bytes`), each device sends, and receives:

    all-reduce                        2 (n - 1) / n B
    reduce-scatter, all-gather            (n - 1) / n B
    all-to-all                            (n - 1) / n B
    collective-permute        B a pair; 0 for a device paired with itself
    collective-broadcast      B, except that the last sends and the first receives 0

Who sends to whom is that model too: in a ring each device of a group sends to the next
one, in the order of the group; in an all-to-all each sends 1 / n to every other.

A ring moves chunks of whole elements: 3 elements on 8 devices travel as 8 chunks of
one element, 56 bytes of float32 each way and not 21. So figures are whole numbers, and
each array has its own chunks, so that they do not change when XLA combines collectives.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdp.program.collective import CollectiveOp
from jaxdp.program.hlo.shapes import Array


def sent(op: CollectiveOp) -> Counter[int]:
    """Bytes sent by device, in one run of the operation.

    Example:
        >>> array = Array("f32", (16,), 32)
        >>> sent(CollectiveOp("all-reduce", (array,), groups=(tuple(range(8)),)))[3]
        112
    """
    if op.kind == "collective-permute":
        return _sum((source, size) for (source, _), size in links(op).items())
    if op.kind == "collective-broadcast":
        return _sum((device, op.bytes) for group in op.groups for device in group[:-1])
    return _ring(op)


def received(op: CollectiveOp) -> Counter[int]:
    """Bytes received by device, in one run of the operation."""
    if op.kind == "collective-permute":
        return _sum((target, size) for (_, target), size in links(op).items())
    if op.kind == "collective-broadcast":
        return _sum((device, op.bytes) for group in op.groups for device in group[1:])
    return _ring(op)


def links(op: CollectiveOp) -> Counter[tuple[int, int]]:
    """Bytes by (source, target), in one run of the operation.

    Exact for a permute. For the other kinds a model, that of the module docstring: the
    runtime may choose another algorithm, or several rings in different orders.

    Example:
        >>> array = Array("f32", (16,), 32)
        >>> links(CollectiveOp("all-gather", (array,), groups=((0, 2), (1, 3))))
        Counter({(0, 2): 64, (2, 0): 64, (1, 3): 64, (3, 1): 64})
    """
    if op.kind == "collective-permute":
        moved = [pair for pair in op.pairs if pair[0] != pair[1]]
        return Counter(dict.fromkeys(moved, op.bytes))
    return _sum(
        (link, amount)
        for group in op.groups
        for link, amount in _group_links(op, group)
    )


def total(
    ops: Iterable[CollectiveOp],
    measure: Callable[[CollectiveOp], Counter[Any]],
    depth: int = 0,
) -> Counter[Any]:
    """Add up a measure over a program, each operation as often as it runs.

    Of the branches of a conditional one runs, and the text does not say which. The
    largest counts, taken for every key (device, link, kind) by itself, so the total is
    an upper bound wherever there is an operation with `conditional=True`.
    """
    result: Counter[Any] = Counter()
    alike: Counter[Any] = Counter()
    forks: dict[str, dict[int, list[CollectiveOp]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for op in ops:
        if len(op.branch) > depth:
            conditional, index = op.branch[depth]
            forks[conditional][index].append(op)
        else:
            alike[op.kind, op.arrays, op.groups, op.pairs] += op.count
    for (kind, arrays, groups, pairs), count in alike.items():
        measured = measure(CollectiveOp(kind, arrays, groups, pairs))
        result.update({key: count * n for key, n in measured.items()})
    for branches in forks.values():
        totals = [total(branch, measure, depth + 1) for branch in branches.values()]
        for key in set().union(*totals):
            result[key] += max(each[key] for each in totals)
    return result


def _group_links(
    op: CollectiveOp, group: tuple[int, ...]
) -> Iterator[tuple[tuple[int, int], int]]:
    """What a group of a kind without pairs sends, link by link."""
    size = len(group)
    if op.kind == "all-to-all":
        each = _ring_bytes(op, size) // max(size - 1, 1)
        yield from ((link, each) for link in itertools.permutations(group, 2))
    elif op.kind == "collective-broadcast":
        yield from ((link, op.bytes) for link in itertools.pairwise(group))
    elif size > 1:
        amount = _ring_bytes(op, size)
        ring = zip(group, (*group[1:], group[0]), strict=True)
        yield from ((link, amount) for link in ring)


def _ring(op: CollectiveOp) -> Counter[int]:
    return _sum(
        (device, _ring_bytes(op, len(group))) for group in op.groups for device in group
    )


def _ring_bytes(op: CollectiveOp, size: int) -> int:
    """Bytes a device of a group of `size` sends, which is also what it receives."""
    if op.kind == "all-gather":
        return (size - 1) * sum(array.bytes for array in op.arrays)
    if op.kind == "all-to-all":
        # Either one array of which each device keeps 1 / size, or an array a device.
        return (size - 1) * -(-op.bytes // size)
    chunks = sum(_chunk_bytes(array, size) for array in op.arrays)
    return op.ring_passes * (size - 1) * chunks


def _chunk_bytes(array: Array, chunks: int) -> int:
    elements = -(-array.elements // chunks)
    return -(-elements * array.bits // 8)


def _sum(items: Iterable[tuple[Any, int]]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    for key, amount in items:
        counter[key] += amount
    return counter
