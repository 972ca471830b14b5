"""Rows about compiled steps: what they take, what XLA did, and what was to be reached.

Everything is of the busiest device. Exposed is what communication adds to the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.harness.result import Rows
from experiments.parts.hidden_steps import AFTER, BUCKETS, MERGED, NATIVE, RING, Step
from jaxdp.program.timeline import Timeline

Row = Mapping[str, Any]
PERMUTE = "collective-permute"
PREDICTED = (
    "predicted from compiled programs, of the busiest device; native ratio: to the "
    "step of NativeAllReduce as XLA merges it"
)
READ = (
    "collectives that were compiled, permutes and others, and how many of them block "
    "the device; in a gap, predicted, no kernel runs; kept: the design's buckets"
)
REACH_MODEL, REACH_DEVICES = "GPT-2 small", 8


def times(steps: Sequence[Step], timelines: Sequence[Timeline]) -> Rows:
    """What each step takes, and how it compares with XLA's own all-reduce.

    Args:
        steps: Of any models and numbers of devices, a native one of each among them.
        timelines: Theirs, with some links.
    """
    rows = [_times(*each) for each in zip(steps, timelines, strict=True)]
    native = {
        (row["model"], row["devices"]): row["step_ms"]
        for row in rows
        if (row["design"], row["variant"]) == (NATIVE, MERGED)
    }
    for row in rows:
        row["native ratio"] = row["step_ms"] / native[row["model"], row["devices"]]
    return rows


def _times(step: Step, timeline: Timeline) -> dict[str, Any]:
    return {
        "model": step.model,
        "design": step.way.name,
        "variant": step.way.variant,
        "devices": step.devices,
        "step_ms": 1e3 * timeline.step_s,
        "compute_ms": 1e3 * timeline.compute_s,
        "communication_ms": 1e3 * timeline.communication_s,
        "exposed_fraction": timeline.exposed_fraction,
        "link GB per s": timeline.hardware.link.bytes_per_s / 1e9,
        "label": PREDICTED,
    }


def scheduled(steps: Sequence[Step]) -> dict[str, Rows]:
    """What XLA made of the collectives, and where kernels are missing, by model."""
    names = dict.fromkeys(step.model for step in steps)
    return {
        f"schedules of {name}": [
            _scheduled(step) for step in steps if step.model == name
        ]
        for name in names
    }


def _scheduled(step: Step) -> dict[str, Any]:
    found = step.verdict.distances
    permutes = [one for one in found if one.kind == PERMUTE]
    gaps = [*gaps_s(step.fast)]
    return {
        "design": step.way.name,
        "variant": step.way.variant,
        "devices": step.devices,
        "permutes": len(permutes),
        "others": len(found) - len(permutes),
        "synchronous": sum(one.blocking for one in found),
        "longest gap_ms": 1e3 * max(gaps, default=0.0),
        "kept": step.verdict.kept,
        "compile_s": round(step.compile_s, 1),
        "label": READ,
    }


def gaps_s(timeline: Timeline) -> Iterator[float]:
    """How long the busiest device does not compute, each time that it does not."""
    busy = [b for b in timeline.bars if b.stream == "compute"]
    spans = sorted((bar.start_s, bar.end_s) for bar in busy)
    until_s, least_s = 0.0, 1e-9 * timeline.step_s  # what rounding leaves is no gap
    for start_s, end_s in [*spans, (timeline.step_s, timeline.step_s)]:
        if start_s - until_s > least_s:
            yield start_s - until_s
        until_s = max(until_s, end_s)


def reach(fast: Rows, slow: Rows) -> Rows:
    """What the ring of the transformer was to reach on one host, and whether it does.

    Args:
        fast: Times with the links of the target.
        slow: Times of the same steps with slower links.

    Returns:
        No rows, if that was not compiled.
    """
    found = []
    for rows, most in ((fast, 1.10), (slow, 1.00)):
        own = {
            (row["design"], row["variant"]): row
            for row in rows
            if (row["model"], row["devices"]) == (REACH_MODEL, REACH_DEVICES)
        }
        if not own:
            continue
        ring, at = own[RING, AFTER], f"{rows[0]['link GB per s']:g} GB/s"
        if rows is fast:
            share = ring["exposed_fraction"]
            found.append(_reached(f"exposed share of the ring, {at}", 0.25, share))
        for variant in (MERGED, BUCKETS):
            ratio = ring["step_ms"] / own[NATIVE, variant]["step_ms"]
            found.append(_reached(f"ring / native {variant}, {at}", most, ratio))
    return found


def _reached(what: str, most: float, measured: float) -> Row:
    return {
        "what": what,
        "required": f"at most {most:.2f}",
        "measured": measured,
        "met": measured <= most,
        "label": f"steps of {REACH_MODEL} on {REACH_DEVICES} devices of one host",
    }
