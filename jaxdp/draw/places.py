"""Where devices stand in a picture of the links between them.

Places are points in a square of side 1, y downwards. A device never stands on a link
of others: such a link is bent around it.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxdp.schedule import Schedule

Point = tuple[float, float]
RADIUS = 0.4  # of the circle
NEAR = 0.09  # a link comes no nearer to other devices
BEND, SLIGHT, WIDE = 0.1, 0.03, 0.22  # height of a link, in parts of its length


@dataclasses.dataclass(frozen=True)
class Link:
    """The way from one device to another: a curve over the point `over`.

    The curve is a quadratic Bezier curve with `over` as its control point. If there is
    room, it bends to the left of who travels it: the ways of a pair lie side by side.
    """

    source: int
    target: int
    over: Point


@dataclasses.dataclass(frozen=True)
class Places:
    """Where devices stand, and which links the schedule uses.

    Attributes:
        points: Of every device.
        links: Every link that carries something in some round.
        groups: Devices that share a host, where there are several hosts.
    """

    points: tuple[Point, ...]
    links: tuple[Link, ...]
    groups: tuple[tuple[int, ...], ...] = ()


def places(schedule: Schedule, hosts: int = 1) -> Places:
    """Places devices as suits who sends to whom.

    Args:
        schedule: Any.
        hosts: Into how many columns to put devices; 1 puts them on a circle, or around
            a root if it takes part in every transfer, or into a tree if all are links
            of one.
    """
    pairs = sorted({p for r in schedule.rounds for t in r.transfers for p in t.pairs})
    devices, groups = schedule.devices, ()
    centre = set(range(devices)).intersection(*map(set, pairs))
    if hosts > 1:
        size = devices // hosts
        groups = tuple(tuple(range(h * size, h * size + size)) for h in range(hosts))
        points = _columns(groups)
    elif devices > 2 and len(centre) == 1:
        points = _star(devices, *centre)
    elif devices > 2 and (children := _children(pairs, devices)):
        points = _tree(children)
    else:
        points = _circle(devices)
    links = (Link(s, t, _over(points, s, t)) for s, t in pairs)
    return Places(tuple(points), tuple(links), groups)


def _circle(devices: int) -> list[Point]:
    """Clockwise, the first at the top; two stand side by side, one in the middle."""
    if devices == 1:
        return [(0.5, 0.5)]
    first = math.pi if devices == 2 else -math.pi / 2
    angles = (first + 2 * math.pi * device / devices for device in range(devices))
    return [(0.5 + RADIUS * math.cos(a), 0.5 + RADIUS * math.sin(a)) for a in angles]


def _star(devices: int, root: int) -> list[Point]:
    """The root in the middle."""
    points = _circle(devices - 1)
    return [*points[:root], (0.5, 0.5), *points[root:]]


def _columns(groups: Sequence[Sequence[int]]) -> list[Point]:
    """A host in each column, its devices from top to bottom."""
    points = []
    for host, group in enumerate(groups):
        x = (host + 0.5) / len(groups)
        points += [(x, (i + 0.5) / len(group)) for i in range(len(group))]
    return points


def _tree(children: dict[int, list[int]]) -> list[Point]:
    """Parents above the middle of their children; leaves side by side."""
    across: dict[int, float] = {}
    down: dict[int, int] = {}

    def place(device: int, depth: int) -> None:
        down[device] = depth
        for child in children[device]:
            place(child, depth + 1)
        below = [across[child] for child in children[device]]
        leaves = sum(not children[placed] for placed in across)
        across[device] = sum(below) / len(below) if below else leaves

    place(0, 0)
    width, height = max(across.values()) + 1, max(down.values()) + 1
    return [
        ((across[device] + 0.5) / width, (down[device] + 0.5) / height)
        for device in sorted(children)
    ]


def _children(pairs: Sequence[tuple[int, int]], devices: int) -> dict[int, list[int]]:
    """The children of every device in the tree that pairs form from device 0.

    None at all if they form no tree.
    """
    edges = {frozenset(pair) for pair in pairs}
    children: dict[int, list[int]] = {0: []}
    waiting = [0]
    while waiting:
        parent = waiting.pop()
        joined = {device for edge in edges if parent in edge for device in edge}
        children[parent] = sorted(joined - {*children})
        children |= {child: [] for child in children[parent]}
        waiting += children[parent]
    return children if len(edges) + 1 == len(children) == devices else {}


def _over(points: Sequence[Point], source: int, target: int) -> Point:
    """The control point of a link: of the bends that pass all others, the first."""
    start, end = points[source], points[target]
    others = [p for d, p in enumerate(points) if d not in (source, target)]
    outside = math.dist(_bent(start, end, WIDE), (0.5, 0.5)) > math.dist(
        _bent(start, end, -WIDE), (0.5, 0.5)
    )
    wide = WIDE if outside else -WIDE
    ways = [_bent(start, end, bend) for bend in (BEND, SLIGHT, wide, -wide)]
    free = (way for way in ways if _clear(others, start, way, end))
    return next(free, ways[0])


def _bent(start: Point, end: Point, bend: float) -> Point:
    """The control point of a curve whose height is `bend` times its length."""
    (x0, y0), (x1, y1) = start, end
    rise = 2 * bend  # a curve comes half as far as its control point
    return (x0 + x1) / 2 + rise * (y1 - y0), (y0 + y1) / 2 - rise * (x1 - x0)


def _clear(others: Sequence[Point], start: Point, over: Point, end: Point) -> bool:
    """Whether a curve comes near to no other device."""
    return all(
        math.dist(along(start, over, end, step / 16), other) > NEAR
        for step in range(1, 16)
        for other in others
    )


def along(start: Point, over: Point, end: Point, t: float) -> Point:
    """The point of a curve at `t`: 0 is its start, 1 its end."""
    a, b, c = (1 - t) ** 2, 2 * t * (1 - t), t**2
    (x0, y0), (x1, y1), (x2, y2) = start, over, end
    return a * x0 + b * x1 + c * x2, a * y0 + b * y1 + c * y2


def shortened(
    start: Point, over: Point, end: Point, room: float
) -> tuple[Point, Point, Point]:
    """The part of a curve that keeps away from both ends."""
    steps = [step / 64 for step in range(65)]
    free = [
        t
        for t in steps
        if min(math.dist(along(start, over, end, t), at) for at in (start, end)) > room
    ] or [0.5]
    a, b = free[0], free[-1]
    weights = (1 - a) * (1 - b), a + b - 2 * a * b, a * b
    points = start, over, end
    x, y = (sum(w * p[i] for w, p in zip(weights, points, strict=True)) for i in (0, 1))
    return along(*points, a), (x, y), along(*points, b)
