"""A schedule as frames: what a picture of one moment shows, as plain data.

The page, the pictures and the animation are drawn from these. Frame `i` shows the
moment after `i` rounds, and what the next one sends.
"""

import dataclasses
from typing import Any

from jaxdp.cost import cost, time_s
from jaxdp.draw import sentences
from jaxdp.draw.panels import Arrow, Cell, moments
from jaxdp.schedule import Schedule
from jaxdp.targets.hardware import Hardware
from jaxdp.targets.hardware import hardware as figures_of

ITEMSIZE = 4  # bytes: buffers are of float32


@dataclasses.dataclass(frozen=True)
class Frame:
    """One moment.

    Attributes:
        title: "Round 3" before round 3, as in `draw_schedule`; "After round 5" last.
        cells: What every device holds of every chunk.
        arrows: What the next round sends.
        sent_bytes: By each device, until now.
        received_bytes: By each device, until now.
        clock_s: What the rounds so far take in the alpha-beta model of `jaxdp.cost`.
        now: What has become true, in words.
        next: What the next round does, in words; "" after the last.
        detail: Which chunks that moves, where `next` does not say.
    """

    title: str
    cells: tuple[Cell, ...]
    arrows: tuple[Arrow, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    clock_s: float
    now: str
    next: str = ""
    detail: str = ""


def frames(
    schedule: Schedule,
    size_bytes: int = 2**26,
    hardware: Hardware | str = "h100",
) -> tuple[Frame, ...]:
    """The frames of a schedule: one before every round and one after the last.

    Args:
        schedule: Verified.
        size_bytes: Of the whole buffer of float32; the last element may be cut off.
        hardware: What runs it, or the name of a target.

    Raises:
        ValueError: The schedule is malformed, the buffer has fewer than 0 bytes, or the
            target is unknown.

    Example:
        >>> from jaxdp.algorithms import ring
        >>> frames(ring(4))[3].now
        'After round 2 every device owns the chunk of its own number complete.'
    """
    elements, machine = -(-size_bytes // ITEMSIZE), figures_of(hardware)
    result, before = [], None
    for done, now in enumerate(moments(schedule)):
        rounds = schedule.rounds[:done]
        so_far = dataclasses.replace(schedule, rounds=rounds, family=None)
        moved = cost(so_far, elements, ITEMSIZE)
        frame = Frame(
            *(now.title, now.cells, now.arrows),
            *(moved.sent_bytes, moved.received_bytes),
            time_s(so_far, elements, ITEMSIZE, machine),
            sentences.true_now(before, now),
            *(sentences.doing(now) if done < len(schedule.rounds) else ()),
        )
        result.append(frame)
        before = now
    return tuple(result)


def record(frame: Frame) -> dict[str, Any]:
    """A frame as JSON.

    `held[device][chunk]` lists devices whose contributions are summed there.
    """
    held: dict[int, list[list[int]]] = {}
    for cell in frame.cells:
        held.setdefault(cell.device, []).append(sorted(cell.held))
    names = ("title", "sent_bytes", "received_bytes", "clock_s", "now", "next")
    sends = [
        {"source": a.source, "target": a.target, "chunk": a.chunk, "op": a.op}
        for a in frame.arrows
    ]
    plain = {name: getattr(frame, name) for name in (*names, "detail")}
    return plain | {"held": [*held.values()], "sends": sends}
