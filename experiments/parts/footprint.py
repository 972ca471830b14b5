"""What devices hold, in parts that can be compared: from the snapshots of a step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.harness.result import Rows
from jaxdp.replicated.views.memory import TEMPORARY, Memory, Snapshot

MIB = 2**20
PARAMETERS, GRADIENTS, ACTIVATIONS = "parameters", "gradients", "activations"
RECEIVED, OPTIMIZER, GATHER = "received gradients", "optimizer state", "gather buffer"
THREE = (RECEIVED, OPTIMIZER, GATHER)  # what the article says the main device adds
OTHER = "other arrays"
MOMENTS = (
    "backward: each device in its backward program; early: if the gradients of the "
    "others arrive meanwhile; reduce: when all have arrived, activations and replicas "
    "are gone; others: their mean; more = received + state + buffer + rest"
)
PARTS = {  # which kinds of a snapshot make a part; all others are `OTHER`
    PARAMETERS: ("parameters",),
    OPTIMIZER: ("optimizer state",),
    GRADIENTS: ("gradients",),
    RECEIVED: ("received gradients",),
    ACTIVATIONS: ("activations",),
    GATHER: ("received outputs", "gathered outputs"),
    "outputs": ("outputs", "output gradients", "loss"),
    "batch": ("batch", "targets"),
    "buffers": ("buffers", "model state"),
    TEMPORARY: (TEMPORARY,),
}
Split = dict[str, int]  # bytes by part; every part is there
Held = dict[str, Split]  # by device; the first is the main device


class Moment(NamedTuple):
    """All devices at one moment.

    Attributes:
        stage: Such as "7 backward".
        held: What each device holds; one that holds nothing is not there.
    """

    stage: str
    held: Held

    def total(self, device: str) -> int:
        """Bytes of the step that a device holds."""
        return own_bytes(self.held.get(device, {}))


def own_bytes(parts: Split) -> int:
    """Bytes of all parts: without what was there before the step, or is not its own."""
    return sum(size for part, size in parts.items() if part != OTHER)


def split(kinds: dict[str, int]) -> Split:
    """Bytes by kind as bytes by part."""
    parts = {
        part: sum(kinds.get(kind, 0) for kind in own) for part, own in PARTS.items()
    }
    return parts | {OTHER: sum(kinds.values()) - sum(parts.values())}


def moments(snapshots: Sequence[Snapshot]) -> list[Moment]:
    """Puts together what was counted together: a moment lists each device once."""
    found: list[Moment] = []
    last = None
    for each in snapshots:
        about = (each.stage, each.what)
        if last != about or each.device in found[-1].held:
            found.append(Moment(each.stage, {}))
        found[-1].held[each.device] = split(each.kinds)
        last = about
    return found


def fullest(memory: Memory, devices: Sequence[str], stage: str | None = None) -> Held:
    """What each device holds at its own fullest moment, of a stage or of all."""
    found = [m for m in moments(memory.snapshots) if stage in (None, m.stage)]
    return {
        device: max(found, key=lambda m: m.total(device)).held.get(device, split({}))
        for device in devices
    }


def together(memory: Memory, devices: Sequence[str], stage: str) -> Held:
    """What all devices hold when the first holds most of a stage."""
    found = [m for m in moments(memory.snapshots) if m.stage == stage]
    moment = max(found, key=lambda m: m.total(devices[0]))
    return {device: moment.held.get(device, split({})) for device in devices}


def with_received(held: Held, gradients: Held) -> Held:
    """The same, with all gradients on the main device already."""
    main, *others = held
    received = {RECEIVED: gradients[main][RECEIVED]}
    return {main: held[main] | received} | {device: held[device] for device in others}


def by_part(held: Held) -> Rows:
    """A row for each part, for all, and for what is not the step's; in bytes."""
    columns = {f"{device}_bytes": parts for device, parts in held.items()}
    rows = [
        {"part": part} | {name: parts[part] for name, parts in columns.items()}
        for part in PARTS
        if any(parts[part] for parts in held.values())
    ]
    rows.append({"part": "all"} | {n: own_bytes(parts) for n, parts in columns.items()})
    return [*rows, {"part": OTHER} | {n: parts[OTHER] for n, parts in columns.items()}]


def by_stage(memory: Memory, devices: Sequence[str]) -> Rows:
    """For each stage the fullest moment of each device, in MiB."""
    stages = dict.fromkeys(snapshot.stage for snapshot in memory.snapshots)
    rows = []
    for stage in stages:
        held = fullest(memory, devices, stage)
        sizes = {f"{d}_mb": own_bytes(parts) / MIB for d, parts in held.items()}
        rows.append({"stage": stage} | sizes)
    return rows


def difference(moment: str, held: Held) -> dict[str, Any]:
    """What the main device holds more than the mean of the others, in three parts."""
    main, *others = held.values()
    mean = {part: sum(each[part] for each in others) / len(others) for part in main}
    of_main, of_others = own_bytes(main), sum(map(own_bytes, others)) / len(others)
    parts = {part: (main[part] - mean[part]) / MIB for part in THREE}
    more = (of_main - of_others) / MIB
    row: dict[str, Any] = {"moment": moment, "label": MOMENTS}
    row |= {"main_mb": of_main / MIB, "others_mb": of_others / MIB}
    row |= {"more_mb": more, "more (%)": 100 * (of_main / of_others - 1)}
    row |= {f"{part}_mb": size for part, size in parts.items()}
    return row | {"rest_mb": more - sum(parts.values())}


def saved(training: Held, inference: Held) -> Rows:
    """What inference needs less than training, by device, in parts."""
    rows = []
    for device, parts in training.items():
        before, after = own_bytes(parts), own_bytes(inference[device])
        row = {"device": device, "training_mb": before / MIB}
        row |= {"inference_mb": after / MIB, "saved (%)": 100 * (1 - after / before)}
        less = {
            part: (parts[part] - inference[device][part]) / MIB
            for part in (ACTIVATIONS, GRADIENTS, RECEIVED, OPTIMIZER, TEMPORARY)
        }
        row |= {f"{part}_mb": size for part, size in less.items()}
        rest = (before - after) / MIB - sum(less.values())
        rows.append(row | {"rest_mb": rest})
    return rows
