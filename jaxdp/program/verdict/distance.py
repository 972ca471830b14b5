"""What stands between the start of a collective and its end, in the scheduled module.

A collective in two halves, `-start` and `-done`, runs beside the kernels between them;
one in a single instruction, or one that XLA marked `is_sync`, blocks. The halves are
counted where they stand: in the text of a scheduled module, order is the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxdp.program.collective import kind_of
from jaxdp.program.hlo import Instruction, Module
from jaxdp.program.hlo.opcodes import FREE, SECOND_HALVES, is_marked_sync
from jaxdp.program.hlo.shapes import quote
from jaxdp.program.products import is_matmul
from jaxdp.program.walk import computations_of

_NO_KERNEL = (*FREE, "domain")


@dataclass(frozen=True)
class Distance:
    """What is scheduled between the start and the end of one collective.

    Attributes:
        name: The instruction that starts it.
        kind: As of `CollectiveOp`.
        op_name: The JAX operation it comes from.
        kernels: Instructions that do work between its halves.
        matmuls: Matrix products and convolutions among them, or in them.
        blocking: Whether the device does nothing else meanwhile.
    """

    name: str
    kind: str
    op_name: str
    kernels: int
    matmuls: int
    blocking: bool


def distances(module: Module) -> tuple[Distance, ...]:
    """The distance of every collective of a module, in the order of the text."""
    wrapped, fused = _wrapped(module), _fused(module)
    inner = {one.name for one in wrapped.values()}
    found: dict[str, Distance] = {}
    for name, computation in module.computations.items():
        instructions = list(computation.values())
        for position, start in enumerate(instructions):
            one = wrapped.get(start.name, start)
            if kind_of(one) and start.name not in inner:
                between = _between(instructions, position)
                # TPUs run some inside a fusion, beside the products of that fusion.
                beside = instructions if name in fused else between
                found[start.name] = _distance(module, start, one, between, beside)
    return tuple(found.values())


def _wrapped(module: Module) -> dict[str, Instruction]:
    """Collectives in a computation that an `async-start` runs, by its name."""
    return {
        one.name: inner
        for computation in module.computations.values()
        for one in computation.values()
        if one.opcode == "async-start"
        for called in computations_of(one)
        for inner in module.computations[called].values()
        if kind_of(inner)
    }


def _fused(module: Module) -> set[str]:
    """The computations of fusions."""
    return {
        called
        for computation in module.computations.values()
        for one in computation.values()
        if one.opcode == "fusion"
        for called in computations_of(one)
    }


def _distance(
    module: Module,
    start: Instruction,
    one: Instruction,
    between: Sequence[Instruction],
    beside: Sequence[Instruction],
) -> Distance:
    """The distance of a collective, from what runs between its halves."""
    matmuls = sum(_matmuls(module, other) for other in beside)
    blocking = is_marked_sync(start) or not (between or matmuls)
    op_name, _ = module.origin(one)
    kind = kind_of(one) or one.opcode
    return Distance(start.name, kind, op_name, len(between), matmuls, blocking)


def _between(instructions: Sequence[Instruction], position: int) -> list[Instruction]:
    """The kernels from a start to the instruction that waits for it."""
    kernels, start = [], instructions[position]
    waiting = {start.name}
    if not start.opcode.endswith("-start"):
        return kernels
    for one in instructions[position + 1 :]:
        if one.opcode.endswith(SECOND_HALVES) and waiting & {*one.operands}:
            if one.opcode.endswith("-done"):
                return kernels
            waiting.add(one.name)
        elif _is_kernel(one):
            kernels.append(one)
    raise ValueError(
        f"analyze found no end of {quote(start.line)}. An asynchronous collective ends "
        "in a '-done' of the same computation. Pass compiled.as_text() unchanged."
    )


def _is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction computes something, or copies it."""
    opcode = instruction.opcode
    if opcode in _NO_KERNEL or opcode.endswith(SECOND_HALVES):
        return False
    return kind_of(instruction) is None and opcode not in ("async-start", "copy-start")


def _matmuls(module: Module, instruction: Instruction) -> int:
    """Matrix products in an instruction, and in what it runs."""
    called = computations_of(instruction)
    inner = (one for name in called for one in module.computations[name].values())
    return is_matmul(instruction) + sum(_matmuls(module, one) for one in inner)
