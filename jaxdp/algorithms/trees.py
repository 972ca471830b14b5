"""Binary trees: sums rise to a root, and come down again.

The root is the middle of all devices in a circle, its children are the middles of the
two halves that remain, and so on: subtrees are neighbours, which share a host. The
deepest level is d = floor(log2 N). N = 7, root 3:

    level 0               3
    level 1       1               5
    level 2   0       2       4       6

A device has one parent and two children, whatever N is: it never sends or receives more
than three buffers, where the root of a star sends and receives N - 1. A round has one
transfer for all left children and one for all right ones.

Cut into C chunks, a buffer fills the tree: while one chunk goes down from a level, the
next one comes to it. A tree alone uses half of what its links carry, since half of the
devices are leaves; `double_binary_tree` uses all of it.

Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009), which compares pipelined trees.
"""

from jaxdp.algorithms.building import (
    backwards,
    checked_chunks,
    everywhere,
    for_any_devices,
    moved,
    overlapped,
)
from jaxdp.schedule import Round, Schedule

CHUNKS = 8  # by default: down to 1,023 devices, they take 16 rounds


@for_any_devices
def tree_broadcast(devices: int, root: int = 0) -> Schedule:
    """Every device sends the whole buffer to its two children in a binary tree.

    Cost: floor(log2 N) rounds of two transfers, the last perhaps of one; each device
    sends K bytes per child and receives K, the root nothing.
    """
    return _down(devices, root, 1, f"tree_broadcast({devices}, root={root})")


@for_any_devices
def tree_reduce(devices: int, root: int = 0) -> Schedule:
    """Every device adds what its children send, and sends the sum to its parent.

    Cost: floor(log2 N) rounds of two transfers, the first perhaps of one; each device
    receives K bytes per child and sends K, the root nothing.
    """
    down = tree_broadcast(devices, root)
    return backwards(down, f"tree_reduce({devices}, root={root})")


@for_any_devices
def tree(devices: int, root: int = 0) -> Schedule:
    """Tree all-reduce: `tree_reduce` to the root, then `tree_broadcast` from it.

    Cost: 2 floor(log2 N) rounds; no device sends or receives more than 3 K bytes.
    """
    reduced = tree_reduce(devices, root)
    return reduced.then(tree_broadcast(devices, root), f"tree({devices}, root={root})")


@for_any_devices
def pipelined_tree_broadcast(
    devices: int, root: int = 0, chunks: int = CHUNKS
) -> Schedule:
    """As `tree_broadcast`, chunk after chunk: level `l` sends `i - l` in round `i`.

    Cost: C + floor(log2 N) - 1 rounds of C chunks of K / C bytes, as many bytes as
    `tree_broadcast`.
    """
    name = f"pipelined_tree_broadcast({devices}, root={root}, chunks={chunks})"
    return _down(devices, root, checked_chunks(name, chunks), name)


@for_any_devices
def pipelined_tree_reduce(
    devices: int, root: int = 0, chunks: int = CHUNKS
) -> Schedule:
    """As `tree_reduce`, chunk after chunk.

    Cost: C + floor(log2 N) - 1 rounds of C chunks of K / C bytes, as many bytes as
    `tree_reduce`.
    """
    name = f"pipelined_tree_reduce({devices}, root={root}, chunks={chunks})"
    return backwards(_down(devices, root, checked_chunks(name, chunks), name), name)


@for_any_devices
def pipelined_tree(devices: int, root: int = 0, chunks: int = CHUNKS) -> Schedule:
    """As `tree`, chunk after chunk; complete ones come down while others rise.

    Cost: C + 2 floor(log2 N) - 1 rounds of up to four transfers; as many bytes as
    `tree`, in chunks of K / C.
    """
    name = f"pipelined_tree({devices}, root={root}, chunks={chunks})"
    down = _down(devices, root, checked_chunks(name, chunks), name)
    return overlapped(backwards(down, name), down, devices.bit_length() - 1, name)


def _down(devices: int, root: int, chunks: int, name: str) -> Schedule:
    """The broadcast: in round `i` devices on level `l` send chunk `i - l`."""
    levels = _levels(devices, root)
    rounds = []
    for index in range(chunks + len(levels) - 1 if levels else 0):
        sides = ([], [])  # (source, target, chunk) to left and to right children
        for level, edges in enumerate(levels):
            if 0 <= index - level < chunks:
                for side, parent, child in edges:
                    sides[side].append((parent, child, index - level))
        rounds.append(Round(tuple(moved(side, "replace") for side in sides if side)))
    starts, ends = ((root,),) * chunks, everywhere(devices, chunks)
    return Schedule(name, devices, chunks, starts, ends, tuple(rounds))


def _levels(devices: int, root: int) -> list[list[tuple[int, int, int]]]:
    """The edges below each level: (0 to the left or 1 to the right, parent, child)."""

    def rank(place: int) -> int:
        return (place - devices // 2 + root) % devices

    levels, spans = [], [(0, devices)]
    while spans:
        edges, below = [], []
        for first, end in spans:
            middle = (first + end) // 2
            for side, span in enumerate(((first, middle), (middle + 1, end))):
                if span[0] < span[1]:
                    edges.append((side, rank(middle), rank(sum(span) // 2)))
                    below.append(span)
        levels += [edges] if edges else []
        spans = below
    return levels
