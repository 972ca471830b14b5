"""How much of its operands a fusion reads: only what its results are made of.

XLA fuses what makes an array into what takes a part of it, and then computes that part
alone. So elements are counted backwards, from what each result needs: an element of an
elementwise result needs one of each operand, a slice needs as many as it has, a sum
over an axis needs all that it adds up. Which elements they are is not followed: two
halves are taken for different ones, and a part of joined arrays for a part of each. But
a part whose place is only known at run time may lie in any one of them: it counts for
each, so that the device that reads most is counted, such as the root of a star.
"""

from collections.abc import Iterator, Mapping

from jaxdp.program.hlo import Computation, Instruction
from jaxdp.program.hlo.opcodes import WITHOUT_OPERANDS
from jaxdp.program.hlo.shapes import arrays

TAKES = ("slice", "dynamic-slice", "gather")
_ANYWHERE = ("dynamic-slice", "gather")


def updates(instruction: Instruction) -> tuple[str, ...]:
    """What updates arrays in place, one for each; they are the first operands."""
    operands = instruction.operands
    if instruction.opcode == "dynamic-update-slice":  # array, update, indices
        return tuple(operands[1:2])
    if instruction.opcode == "scatter":  # arrays, indices, updates
        return tuple(operands[len(operands) // 2 + 1 :])
    return ()


def elements_needed(computation: Computation) -> Mapping[str, float]:
    """Elements of each result that the root of a fused computation is made of.

    Args:
        computation: As XLA prints it, operands before what uses them.
    """
    sizes = {name: _elements(one) for name, one in computation.items()}
    needed: dict[str, float] = dict.fromkeys(computation, 0.0)
    anywhere = set()  # results of which a part is taken that may lie anywhere
    for name, instruction in reversed([*computation.items()]):
        if instruction.is_root:
            needed[name] = sizes[name]
        share = min(1.0, needed[name] / sizes[name]) if sizes[name] else 0.0
        if not share or instruction.opcode in WITHOUT_OPERANDS:
            continue
        joins = instruction.opcode == "concatenate" and name in anywhere
        if instruction.opcode in _ANYWHERE or (name in anywhere and not joins):
            anywhere.add(instruction.operands[0])
        for operand, elements in _passed_on(instruction, share, sizes):
            elements = needed[name] if joins else elements
            needed[operand] = min(sizes[operand], needed[operand] + elements)
    return needed


def _passed_on(
    instruction: Instruction, share: float, sizes: Mapping[str, int]
) -> Iterator[tuple[str, float]]:
    """What an instruction needs of its operands for a share of its result."""
    in_place = len(updates(instruction))
    for place, operand in enumerate(instruction.operands):
        if place == 0 and instruction.opcode in TAKES:
            yield operand, share * sizes[instruction.name]
        elif place < in_place:
            yield operand, 0.0
        else:
            yield operand, share * sizes[operand]


def _elements(instruction: Instruction) -> int:
    """Elements of a result, those of a tuple together."""
    return sum(array.elements for array in arrays(instruction.shape, ""))
