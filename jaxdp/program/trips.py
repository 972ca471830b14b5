"""How often a loop of a compiled program runs.

XLA writes it on CPUs and GPUs. On TPUs it does not, and it follows from the loop: a
counter of constant start and step, compared with a constant.
"""

import re

from jaxdp.program.hlo import Computation, Instruction, Module, root_of
from jaxdp.program.hlo.opcodes import WITHOUT_OPERANDS
from jaxdp.program.hlo.shapes import quote

_KNOWN = re.compile(r'"known_trip_count":\s*\{"n":\s*"?(\d+)"?\}')
_CONSTANT = re.compile(r"\bconstant\((-?\d+)\)")
_SAME = ("copy", "bitcast", "convert", "copy-start", "copy-done")


def trip_count(module: Module, around: Computation, loop: Instruction) -> int:
    """How often the body of a loop runs.

    Args:
        module: The program.
        around: The computation with the loop.
        loop: A `while`.

    Raises:
        ValueError: the text does not say.
    """
    if match := _KNOWN.search(loop.line.replace('\\"', '"')):
        return int(match[1])
    try:
        trips = _counted(module, around, loop)
    except (KeyError, IndexError):  # it is written in another way
        trips = None
    if trips is None:
        raise ValueError(
            f"analyze cannot tell how often the loop {loop.name!r} runs: "
            f"{quote(loop.line)}. That needs known_trip_count, which XLA writes when "
            "the bounds are constants, or a counter of constant start and step that "
            "is compared with a constant. Use jax.lax.fori_loop or jax.lax.scan with a "
            "fixed length instead of while_loop, or analyze the loop body by itself."
        )
    return trips


def _counted(module: Module, around: Computation, loop: Instruction) -> int | None:
    """The trips of a loop that counts up to a constant, or None."""
    condition, body = (
        module.computations[loop.attributes[key].lstrip("%")]
        for key in ("condition", "body")
    )
    test = root_of(condition)
    compared = [_made(condition, name) for name in test.operands]
    if test.opcode != "compare" or compared[0].opcode != "get-tuple-element":
        return None
    element = int(compared[0].attributes["index"])
    given, turned = _made(around, loop.operands[0]), root_of(body)
    if (given.opcode, turned.opcode) != ("tuple", "tuple"):
        return None
    added = _made(body, turned.operands[element])
    step = next((v for v in map(_value, _operands(body, added)) if v is not None), None)
    start = _value(_made(around, given.operands[element]))
    end = _value(compared[1])
    if added.opcode != "add" or start is None or end is None or not step or step < 0:
        return None
    last = {"LT": end, "LE": end + 1}.get(test.attributes.get("direction", ""))
    return None if last is None else max(0, -(-(last - start) // step))


def _made(computation: Computation, name: str) -> Instruction:
    """What has made a value, before it was copied."""
    instruction = computation[name]
    while instruction.opcode in _SAME:
        instruction = computation[instruction.operands[0]]
    return instruction


def _operands(computation: Computation, instruction: Instruction) -> list[Instruction]:
    if instruction.opcode in WITHOUT_OPERANDS:
        return []
    return [_made(computation, name) for name in instruction.operands]


def _value(instruction: Instruction) -> int | None:
    match = _CONSTANT.search(instruction.line)
    return int(match[1]) if match else None
