"""The four questions about a slow step, answered from records and times.

Pure functions: each takes numbers that were measured elsewhere and returns a `Finding`.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxdp.replicated.inputs import chunk_sizes
from jaxdp.replicated.views.trace import Record

# The step waits for the largest slice. With slices a tenth apart the other devices idle
# for less than a tenth of their programs, which is about how exact such times are.
EVEN_RATIO = 1.1
# Without its transfers, a step with this share would be 1.25 times as fast: less is not
# worth another design.
TRANSFER_SHARE = 0.2
# The same for a loop that waits for every step and then for its next batch: this many
# steps' time in next() is a fifth of the loop.
WAIT_RATIO = 0.25
SENT = ("batch", "targets")  # what comes in for every step


class Finding(NamedTuple):
    """One question, what was measured, and what to do about it.

    Attributes:
        question: In words.
        measured: The number that decides.
        unit: Of the number.
        passes: Whether there is nothing to do.
        evidence: The numbers behind it, in words.
        remedy: What to do; empty if it passes.
    """

    question: str
    measured: float
    unit: str
    passes: bool
    evidence: str
    remedy: str


class Place(NamedTuple):
    """Where a step runs.

    Attributes:
        devices: Names, the root's first, such as "cpu:0".
        output_device: Name of the device that outputs are gathered on.
        others: Names of this process's devices that the model was not given.
    """

    devices: tuple[str, ...]
    output_device: str
    others: tuple[str, ...] = ()


def covered_ms(records: Iterable[Record]) -> float:
    """How long at least one of the records was under way."""
    total, reached = 0.0, -math.inf
    for start, end in sorted((record.start_ms, record.end_ms) for record in records):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def span_ms(records: Sequence[Record]) -> float:
    """From the first start to the last end."""
    first = min(record.start_ms for record in records)
    return max(record.end_ms for record in records) - first


def share(chosen: Iterable[Record], records: Sequence[Record]) -> float:
    """The share of a step in which at least one of the chosen records was under way."""
    span = span_ms(records)
    return covered_ms(chosen) / span if span else 0.0


def devices_used(steps: Sequence[Sequence[Record]], place: Place, rows: int) -> Finding:
    """Does every device run a forward program?

    Args:
        steps: The records of some steps.
        place: Where they ran.
        rows: Of the batch.
    """
    forward = _forward(steps[-1])
    used = [device for device in place.devices if device in forward]
    idle = [device for device in place.devices if device not in forward]
    listed = ", ".join(f"{each} {busy(steps, each):.0%}" for each in place.devices)
    evidence = (
        f"{len(used)} of {len(place.devices)} devices ran a forward program. Share of "
        f"the step in programs: {listed}."
    )
    if place.others:
        evidence += f" Not in device_ids: {', '.join(place.others)}."
    remedy = (
        f"{', '.join(idle)} had no rows: {rows} rows on {len(place.devices)} devices "
        f"are slices of {slices_of(rows, place)}. "
        f"Use a batch of {multiples(rows, place)} rows."
    )
    return Finding(
        "Are all devices used?",
        len(used) / len(place.devices),
        "used devices / devices",
        not idle,
        evidence,
        remedy if idle else "",
    )


def busy(steps: Sequence[Sequence[Record]], device: str) -> float:
    """The share of a step in which a device ran a program; the median over steps."""
    return statistics.median(
        share((r for r in step if not r.is_transfer and r.target == device), step)
        for step in steps
    )


def even_split(seen: Counter[int], place: Place) -> Finding:
    """Are the slices equally large?

    Args:
        seen: How many batches had how many rows; the most frequent number is judged.
        place: Where they ran.
    """
    rows = typical(seen)
    sizes = chunk_sizes(rows, len(place.devices))
    idle = len(place.devices) - len(sizes)
    ratio = math.inf if idle else max(sizes) / min(sizes)
    evidence = (
        f"{rows} rows on {len(place.devices)} devices are slices of "
        f"{slices_of(rows, place)} rows: largest over smallest is "
        f"{max(sizes)}/{0 if idle else min(sizes)}."
    )
    others = {n: count for n, count in sorted(seen.items()) if n != rows}
    if others:
        counted = ", ".join(f"{count} of {n} rows" for n, count in others.items())
        evidence += f" Other batches: {counted}."
    remedy = f"Use a batch of {multiples(rows, place)} rows."
    return Finding(
        "Is the split even?",
        ratio,
        "largest / smallest slice",
        ratio <= EVEN_RATIO,
        evidence,
        "" if ratio <= EVEN_RATIO else remedy,
    )


def typical(seen: Counter[int]) -> int:
    """The most frequent number of rows; of several the largest."""
    return max(seen, key=lambda rows: (seen[rows], rows))


def multiples(rows: int, place: Place) -> str:
    """The nearest batch sizes that split evenly, in words."""
    count = len(place.devices)
    down, up = rows // count * count, -(-rows // count) * count
    return " or ".join(str(n) for n in dict.fromkeys([down, up]) if n)


def slices_of(rows: int, place: Place) -> str:
    """The rows of each device, in words; 0 for devices without any."""
    sizes = chunk_sizes(rows, len(place.devices))
    sizes += [0] * (len(place.devices) - len(sizes))
    return ", ".join(map(str, sizes))


def root_transfer(
    steps: Sequence[Sequence[Record]], place: Place, gradient_bytes: int
) -> Finding:
    """How long do arrays travel to and from the root and the output device?

    Args:
        steps: The records of some steps.
        place: Where they ran.
        gradient_bytes: Of one replica's gradients.
    """
    ordered = sorted(steps, key=lambda step: share(_moved(step, place), step))
    usual = ordered[len(ordered) // 2]
    moving = _moved(usual, place)
    measured = share(moving, usual)
    moved = Counter()
    for record in moving:
        moved[record.what] += record.nbytes
    listed = ", ".join(f"{what} {n:,}" for what, n in moved.items())
    evidence = (
        f"{covered_ms(moving):.3f} ms of {span_ms(usual):.3f} ms; {moved.total():,} "
        "bytes to or from "
        f"{' and '.join(dict.fromkeys([place.devices[0], place.output_device]))}"
        f"{': ' + listed if listed else ''}."
    )
    passes = measured <= TRANSFER_SHARE
    return Finding(
        "What share of the step is transfer to and from device 0?",
        measured,
        "of the step",
        passes,
        evidence,
        "" if passes else _less_transfer(usual, place, gradient_bytes),
    )


def input_pipeline(wait_ms: float | None, step_ms: float) -> Finding:
    """Is the next batch there in time?

    Args:
        wait_ms: The median time of next(batches); None if there was no pipeline.
        step_ms: The median time of a step.
    """
    about = ("Is the input pipeline the bottleneck?",)
    if wait_ms is None:
        evidence = "Not asked: one batch was used again and again, no iterator given."
        return Finding(*about, math.nan, "next(batches) / step", True, evidence, "")
    ratio = wait_ms / step_ms
    evidence = (
        f"next(batches) took {wait_ms:.3f} ms, a step {step_ms:.3f} ms (medians): a "
        f"loop that waits for both is blocked {wait_ms / (wait_ms + step_ms):.0%} of "
        "its time."
    )
    workers = math.ceil(ratio)
    remedy = (
        "Prefetch: let a thread call next(batches) while the step runs"
        if workers == 1
        else f"Prepare batches in {workers} workers ({wait_ms:.3f} ms / "
        f"{step_ms:.3f} ms, rounded up) that run ahead of the step"
    )
    passes = ratio <= WAIT_RATIO
    return Finding(
        *about,
        ratio,
        "next(batches) / step",
        passes,
        evidence,
        "" if passes else f"{remedy}.",
    )


def _forward(records: Sequence[Record]) -> set[str]:
    """The devices that ran a forward program."""
    return {record.target for record in records if record.stage.startswith("4 ")}


def _moved(records: Sequence[Record], place: Place) -> list[Record]:
    """Transfers with the root or the output device at one end."""
    ends = {place.devices[0], place.output_device}
    return [
        record
        for record in records
        if record.is_transfer
        and record.nbytes
        and ends & {record.source, record.target}
    ]


def _less_transfer(records: Sequence[Record], place: Place, gradient_bytes: int) -> str:
    """How to move less, with the bytes that each way saves."""
    moved = _moved(records, place)
    root, count = place.devices[0], len(_forward(records))
    remedies = []
    if count > 1:
        ring = 2 * (count - 1) * gradient_bytes / count
        remedies.append(
            "use jaxdp.data_parallel with design=jaxdp.RingAllReduce(), which is how "
            "DistributedDataParallel works: every device sends 2 (N - 1) K / N = "
            f"{ring:,.0f} bytes per step, where the root now sends and receives "
            f"(N - 1) K = {(count - 1) * gradient_bytes:,} bytes each (N = {count}, "
            f"K = {gradient_bytes:,})."
        )
        remedies.append(
            "take a larger batch: parameters and gradients do not grow with it."
        )
    outputs = _bytes(moved, "received outputs", "output gradients")
    if outputs:
        remedies.append(
            "return a smaller output, such as a loss per row: outputs and their "
            f"gradients are {outputs:,} bytes."
        )
    resent = _bytes([record for record in moved if record.source == root], "batch")
    if resent:
        remedies.append(
            f"leave the batch on the host, as NumPy arrays: {resent:,} bytes of it are "
            f"sent on by {root}."
        )
    sent = _bytes([record for record in moved if record.source != root], *SENT)
    if sent and count == 1:
        remedies.append(
            f"send the {sent:,} bytes of a batch ahead, in the input pipeline: "
            "jax.device_put(batch, device)."
        )
    joined = " Or ".join(remedies)
    return joined[:1].upper() + joined[1:]


def _bytes(records: Iterable[Record], *kinds: str) -> int:
    """Bytes moved, of some kinds."""
    return sum(record.nbytes for record in records if record.what in kinds)
