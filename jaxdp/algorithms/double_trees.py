"""Two binary trees side by side: the inner devices of one are leaves of the other.

In one tree half of the devices are leaves, which only send in a reduction and only
receive in a broadcast. Two trees carry half of the buffer each, so that every device
sends about as much as it receives. N = 6, tree 0 for even chunks and tree 1 for odd:

    0                       5
    4                       1
    2       5               3       0
    1   3                   4   2

The place of a device in tree 0 is its rank; in tree 1 it is N - 1 - rank, or rank - 1
if N is odd. A place v > 0 whose lowest set bit is b hangs below v + b or v - b, the one
of them in which bit b is clear and 2 b is set, or below v - b if that is no place. So
all odd places are leaves.

In both trees together a device has at most two children and two parents. So all edges
can be coloured with two colours such that nobody has two children, or two parents, of
one colour. In even rounds data goes along one colour, in odd rounds along the other:
every round is one transfer, in which a device sends one chunk and receives another.

Sources: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009): trees and colours; Jeaugey,
"Massively Scale Your Deep Learning Training with NCCL 2.4", NVIDIA, 2019: an all-reduce
by both trees, each with a root of its own.
"""

import collections
from typing import NamedTuple

from jaxdp.algorithms.building import (
    backwards,
    checked_chunks,
    everywhere,
    for_any_devices,
    moved,
)
from jaxdp.schedule import Round, Schedule

CHUNKS = 8  # by default, four for each tree


class _Edge(NamedTuple):
    """From a parent to its child in one of the trees."""

    tree: int
    parent: int
    child: int


@for_any_devices
def double_binary_tree(devices: int, chunks: int = CHUNKS) -> Schedule:
    """All-reduce by two trees: both reduce to their roots, then broadcast from them.

    Even chunks go through tree 0, whose root is 0, odd ones through tree 1, whose root
    is N - 1, or 1 if N is odd.

    Cost: at most 2 (C + 2 log2 N) rounds of one transfer; no device sends or receives
    more than 2 K bytes, and all together send 2 (N - 1) K.

    Args:
        devices: N.
        chunks: C; more take less time for large buffers, fewer for small ones.
    """
    name = f"double_binary_tree({devices}, chunks={chunks})"
    down = _down(devices, checked_chunks(name, chunks), name)
    return backwards(down, name).then(down, name)


def _down(devices: int, chunks: int, name: str) -> Schedule:
    """The broadcast: chunk `c` from the root of tree `c % 2`, in every second round."""
    edges = [edge for tree in (0, 1) for edge in _edges(devices, tree)]
    colours = _coloured(edges)
    roots = _rank(devices, 0, 0), _rank(devices, 1, 0)
    arrived = {(tree, root): -1 for tree, root in enumerate(roots)}
    moves = collections.defaultdict(list)  # by round: (source, target, chunk)
    for edge in edges:  # parents come before their children
        first = arrived[edge.tree, edge.parent] + 1
        first += (first + colours[edge]) % 2
        arrived[edge.tree, edge.child] = first
        for i, chunk in enumerate(range(edge.tree, chunks, 2)):
            moves[first + 2 * i].append((edge.parent, edge.child, chunk))
    rounds = tuple(Round((moved(moves[index], "replace"),)) for index in sorted(moves))
    starts = tuple((roots[chunk % 2],) for chunk in range(chunks))
    ends = everywhere(devices, chunks)
    return Schedule(name, devices, chunks, starts, ends, rounds)


def _edges(devices: int, tree: int) -> list[_Edge]:
    """The edges of a tree, those of parents before those of their children."""
    edges = []
    for level in reversed(range((devices - 1).bit_length())):
        bit = 1 << level
        for place in range(bit, devices, 2 * bit):
            above = (place - bit) | 2 * bit
            parent = _rank(devices, tree, above if above < devices else place - bit)
            edges.append(_Edge(tree, parent, _rank(devices, tree, place)))
    return edges


def _rank(devices: int, tree: int, place: int) -> int:
    """Which device has a place in a tree."""
    if tree == 0:
        return place
    return (place + 1) % devices if devices % 2 else devices - 1 - place


def _coloured(edges: list[_Edge]) -> dict[_Edge, int]:
    """Colours 0 and 1, so that edges with a parent or a child in common differ."""
    sharing = collections.defaultdict(list)
    for edge in edges:
        sharing["parent", edge.parent].append(edge)
        sharing["child", edge.child].append(edge)
    colours: dict[_Edge, int] = {}
    for first in edges:
        pending = [] if first in colours else [(first, 0)]
        while pending:
            edge, colours[edge] = pending.pop()
            others = sharing["parent", edge.parent] + sharing["child", edge.child]
            pending += [(o, 1 - colours[edge]) for o in others if o not in colours]
    return colours
