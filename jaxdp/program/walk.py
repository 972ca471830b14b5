"""Which collectives one run of a compiled program executes, and how often.

The text names each operation once. A loop body runs as often as its trip count says;
a computation runs once for each place that calls it; an asynchronous operation is
counted where it starts. Computations without a collective are never entered, so
nothing about them can fail.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxdp.program.collective import CollectiveOp, kind_of, read
from jaxdp.program.hlo import Instruction, Module
from jaxdp.program.hlo.opcodes import SECOND_HALVES
from jaxdp.program.hlo.shapes import quote
from jaxdp.program.trips import trip_count

_CALLS = (
    "to_apply",
    "calls",
    "called_computations",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
)
_MENTIONS_CALL = re.compile(rf"\b(?:{'|'.join(_CALLS)})=")
_CALLED_ONCE = ("call", "fusion", "async", "async-start", "call-start", "fusion-start")


def collectives(module: Module) -> tuple[CollectiveOp, ...]:
    """All collectives in the order of the text, `count` and `branch` filled in.

    Raises:
        ValueError: a collective in a loop whose trip count the text does not say, in
            a computation that is called an unknown number of times, or unreadable.
    """
    communicating = _communicating(module)
    found = tuple(_walk(module, communicating, module.entry, _Place()))
    _check_all_reached(module, communicating)
    return found


@dataclass(frozen=True)
class _Place:
    """How often a computation runs, in which branches, and the calls that led to it."""

    count: int = 1
    branch: tuple[tuple[str, int], ...] = ()
    calls: tuple[str, ...] = field(default=())

    def times(self, count: int) -> "_Place":
        return replace(self, count=self.count * count)

    def called_from(self, instruction: Instruction) -> "_Place":
        return replace(self, calls=(*self.calls, instruction.name))

    def in_branch(self, index: int) -> "_Place":
        # The calls tell apart one conditional that is reached in two ways.
        return replace(self, branch=(*self.branch, ("/".join(self.calls), index)))


def _walk(
    module: Module, communicating: set[str], computation: str, place: _Place
) -> Iterator[CollectiveOp]:
    for instruction in module.computations[computation].values():
        if kind := kind_of(instruction):
            op = read(module, module.computations[computation], instruction, kind)
            yield replace(op, count=place.count, branch=place.branch)
            continue
        called = computations_of(instruction)
        if not communicating.isdisjoint(called):
            for inner, place_inside in _enter(module, computation, instruction, place):
                if inner in communicating:
                    yield from _walk(module, communicating, inner, place_inside)


def _enter(
    module: Module, computation: str, instruction: Instruction, place: _Place
) -> Iterator[tuple[str, _Place]]:
    """The computations an instruction runs, each with the place it runs in."""
    around, called = module.computations[computation], computations_of(instruction)
    place = place.called_from(instruction)
    if instruction.opcode == "while":
        trips = trip_count(module, around, instruction)
        yield instruction.attributes["body"].lstrip("%"), place.times(trips)
        # The condition is asked once more than the body runs.
        yield instruction.attributes["condition"].lstrip("%"), place.times(trips + 1)
    elif instruction.opcode == "conditional":
        for index, branch in enumerate(called):
            yield branch, place.in_branch(index)
    elif instruction.opcode in _CALLED_ONCE:
        yield from ((inner, place) for inner in called)
    else:
        raise ValueError(
            f"analyze cannot count the collectives that {instruction.opcode!r} runs in "
            f"{quote(instruction.line)}. It follows while, conditional, "
            f"{', '.join(_CALLED_ONCE)}; the text does not say how often others call. "
            "Move the collective out of it."
        )


def _check_all_reached(module: Module, communicating: set[str]) -> None:
    """Refuses a computation with a collective that nothing calls."""
    reached, found = {module.entry}, [module.entry]
    while found:
        for one in module.computations[found.pop()].values():
            if kind_of(one):
                continue  # what it calls adds two elements
            new = communicating.intersection(computations_of(one)) - reached
            reached |= new
            found += new
    if stray := sorted(communicating - reached):
        inside = module.computations[stray[0]].values()
        line = next((one.line for one in inside if kind_of(one)), "")
        raise ValueError(
            f"analyze found nothing that runs the computation {stray[0]!r}, and it "
            f"communicates: {quote(line)}. A program runs all that is in its text. "
            "Pass compiled.as_text() unchanged."
        )


def computations_of(instruction: Instruction) -> tuple[str, ...]:
    """The computations an instruction names, branches in order."""
    # A -done repeats what its -start calls.
    if instruction.opcode.endswith(SECOND_HALVES):
        return ()
    if not _MENTIONS_CALL.search(instruction.line):
        return ()
    values = (instruction.attributes.get(key, "") for key in _CALLS)
    names = (name for value in values for name in value.strip("{}").split(","))
    return tuple(name.strip().lstrip("%") for name in names if name.strip())


def _communicating(module: Module) -> set[str]:
    """Computations that contain a collective, themselves or in what they call."""
    callers: dict[str, set[str]] = {}
    found = []
    for name, computation in module.computations.items():
        instructions = computation.values()
        if any(kind_of(instruction) for instruction in instructions):
            found.append(name)
        for inner in {each for one in instructions for each in computations_of(one)}:
            callers.setdefault(inner, set()).add(name)
    reached: set[str] = set()
    while found:
        name = found.pop()
        if name not in reached:
            reached.add(name)
            found.extend(callers.get(name, ()))
    return reached
