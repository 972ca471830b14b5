"""What was found about hidden communication: rows of tables, and the claim."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax

from experiments.harness.result import Claim, Rows
from experiments.ledger import catalogue
from experiments.parts.overlap_ways import DEFAULT, LEGEND, Way
from jaxdp.program.dependence import dependence as read_dependence
from jaxdp.program.timeline import Timeline
from jaxdp.program.timeline.scheduled import Done, Item, Kernel, Start

LATE = "τ = 1"
SERVER, PUSH, PULL = 0, "push", "pull"
CARRIES = 1024  # bytes; a transfer of less is a loss, not gradients or parameters


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A step compiled in one way, and how long it takes."""

    max_staleness: int
    way: Way
    program: jax.stages.Compiled
    items: tuple[Item, ...]
    step: Timeline

    @property
    def name(self) -> str:
        """How tables and figures call it."""
        return f"τ = {self.max_staleness}, {self.way.name}"

    @property
    def hidden(self) -> float:
        """The share of communication that adds nothing to the step."""
        return 1 - self.step.exposed_fraction

    @property
    def directions(self) -> dict[str, str]:
        """Whether a transfer pushes or pulls, by name."""
        starts = [item for item in self.items if isinstance(item, Start)]
        return {start.name: _direction(start) for start in starts}

    @cached_property
    def waiting(self) -> int:
        """How many transfers wait for matrix multiplications of the step."""
        return dependence(self.name, self.program)["wait for matmuls"]


def dependence(name: str, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Which transfers and matrix multiplications of a program wait for each other."""
    found = read_dependence(compiled)
    large = {n for n, op in found.collectives.items() if op.bytes >= CARRIES}
    waiting = found.collectives_after_matmuls()
    waited = found.matmuls_after_collectives().values()
    return {
        "program": name,
        "transfers": len(large),
        "wait for matmuls": len(large & waiting.keys()),
        "matmuls": len(found.matmuls),
        "wait for transfers": sum(not large.isdisjoint(names) for names in waited),
        "small transfers": len(found.collectives) - len(large),
        "small ones wait": len(waiting.keys() - large),
    }


def hidden_by(items: Sequence[Item]) -> dict[str, tuple[str, ...]]:
    """For each transfer the matrix multiplications between its start and its done."""
    done_at = {i.start: at for at, i in enumerate(items) if isinstance(i, Done)}
    found = {}
    for at, item in enumerate(items):
        if isinstance(item, Start):
            until = at if item.blocks else done_at[item.name]
            kernels = [i for i in items[at:until] if isinstance(i, Kernel)]
            found[item.name] = tuple(k.name for k in kernels if k.work.flops)
    return found


def row(predicted: Predicted) -> dict[str, Any]:
    """One way to compile a step: what XLA did, and what the step takes."""
    step, beside = predicted.step, hidden_by(predicted.items)
    starts = [item for item in predicted.items if isinstance(item, Start)]
    starts = [item for item in starts if item.op.bytes >= CARRIES]
    return {
        "step": predicted.name,
        "async": f"{sum(not s.blocks for s in starts)} of {len(starts)}",
        "waiting": predicted.waiting,
        "beside": sum(bool(beside[s.name]) for s in starts),
        "compute_ms": 1e3 * step.compute_s,
        "transfers_ms": 1e3 * step.communication_s,
        "exposed_ms": 1e3 * step.exposed_s,
        "step_ms": 1e3 * step.step_s,
        "hidden": round(predicted.hidden, 3),
        "label": LEGEND,
    }


def chosen(every: Sequence[Predicted]) -> list[Predicted]:
    """The synchronous step, the late one as XLA compiles it, and the best way.

    A step in which transfers wait for nothing is better than a shorter one.
    """
    if not every:
        return []
    late = [each for each in every if each.max_staleness]
    best = min(late, key=lambda each: (each.waiting > 0, each.step.step_s))
    defaults = [each for each in every if each.way.name == DEFAULT]
    return [*defaults, *(each for each in (best,) if each not in defaults)]


def beside(chosen: Sequence[Predicted]) -> Rows:
    """For each transfer, how many matrix multiplications run before it must be done."""
    columns = {}
    for each in chosen:
        found = hidden_by(each.items)
        starts = [item for item in each.items if isinstance(item, Start)]
        large = [start for start in starts if start.op.bytes >= CARRIES]
        columns[each.name] = {_transfer(i): len(found[i.name]) for i in large}
    return [
        {"transfer": transfer, **{name: of[transfer] for name, of in columns.items()}}
        for transfer in next(iter(columns.values()))
    ]


def claim(dependences: Rows, chosen: Sequence[Predicted], absent: str) -> Claim:
    """CB4.

    Args:
        dependences: Of all programs, the synchronous one first.
        chosen: The predicted steps, if there are any.
        absent: Why there are none.
    """
    late = [each for each in dependences if LATE in each["program"]]
    best = late[-1]
    predicted = _predicted(chosen) if chosen else f"{absent}."
    return Claim(
        id="CB4",
        claim=catalogue.text("CB4"),
        expected=1.0 if chosen else "all transfers may overlap",
        measured=chosen[-1].hidden if chosen else _allowed(best),
        unit="of communication hidden at a delay of 1, predicted" if chosen else "",
        verdict="partly" if _free(best) else "refuted",
        why="A step computes and sends as much with a delay as without: the ratio "
        "stays, the waiting goes. By dependence, in the compiled programs: without "
        f"delay {_waiting(dependences[0])}; at a delay of 1 "
        f"{'; '.join(map(_waiting, late))}. "
        f"{predicted} Workers wait again as soon as communication takes longer than "
        "computation: a step takes the longer of both.",
    )


def _free(row: Mapping[str, Any]) -> bool:
    """Whether transfers and matrix multiplications can run side by side."""
    return row["transfers"] > 0 == row["wait for matmuls"] + row["wait for transfers"]


def _waiting(row: Mapping[str, Any]) -> str:
    return (
        f"on {row['program']}, {row['wait for matmuls']} of {row['transfers']} "
        f"transfers wait for matrix multiplications and {row['wait for transfers']} of "
        f"{row['matmuls']} of those for a transfer"
    )


def _allowed(row: Mapping[str, Any]) -> str:
    may = row["transfers"] - row["wait for matmuls"]
    return f"{may} of {row['transfers']} may; not scheduled"


def _predicted(chosen: Sequence[Predicted]) -> str:
    """What XLA made of it, in words."""
    synchronous, default, best = chosen[0], chosen[1], chosen[-1]
    return (
        "Scheduled by XLA for H100, not run there: without delay the step takes "
        f"{1e3 * synchronous.step.step_s:.2f} ms, {_exposed(synchronous)}; at a delay "
        f"of 1 by default {1e3 * default.step.step_s:.2f} ms, {_exposed(default)}; "
        f"with {best.way.name} {1e3 * best.step.step_s:.2f} ms, {_exposed(best)}. XLA "
        "keeps one transfer in flight by default and takes it for short."
    )


def _exposed(predicted: Predicted) -> str:
    step = predicted.step
    return (
        f"{1e3 * step.exposed_s:.2f} of {1e3 * step.communication_s:.2f} ms of "
        "communication exposed"
    )


def _transfer(start: Start) -> str:
    """A transfer in words, the same however the program was compiled."""
    pairs = ", ".join(f"{source} → {target}" for source, target in start.op.pairs)
    return f"{_direction(start)} {pairs}"


def _direction(start: Start) -> str:
    return PULL if start.op.pairs[0][0] == SERVER else PUSH
