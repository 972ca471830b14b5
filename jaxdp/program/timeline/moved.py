"""Bytes that one kernel of a compiled program reads and writes.

Every operand is read once and every result written once, at the boundary of a kernel:
what is inside a fusion stays on chip. Except that

    a slice or gather          reads only what it takes
    a fusion                   reads only what its results are made of (see `demand`)
    an update in place         reads and writes only the update
    a library's workspace      is not counted
    on-chip memory (TPU)       is not counted: XLA places arrays there as S(1)
"""

import functools
import math
import re

from jaxdp.program.hlo import Computation, Instruction, Module, root_of
from jaxdp.program.hlo.opcodes import target_of
from jaxdp.program.hlo.shapes import Array, arrays, quote
from jaxdp.program.timeline.demand import TAKES, elements_needed, updates

_ONE_ARRAY = re.compile(r"[a-z]\w*\[[^\]]*\](?:\{[^}]*\})?")
_SPACE = re.compile(r"\{[^}]*S\((\d+)\)")
_DEVICE, _HOST = "0", "5"
# An element of the result is an element of the operand.
_PASSES = ("bitcast", "convert", "copy", "reshape", "transpose")
# Faster than all attributes, and a fusion or call has no other.
_CALLED = re.compile(r", (?:calls|to_apply)=%?([^\s,]+)")


def moved_bytes(
    module: Module, computation: Computation, instruction: Instruction
) -> int:
    """What an instruction reads and writes in the memory of the device.

    Raises:
        ValueError: an operand that is not in the computation, or an array in the memory
            of the host: no link to it is known.
    """
    size = 0
    taken = _taken(module, instruction)
    for name, elements in zip(instruction.operands, taken, strict=True):
        given = _operand(computation, name, instruction)
        read = device_bytes(given.shape, instruction.line)
        if read and elements < math.inf:
            bits = max(a.bits for a in _device_arrays(given.shape, instruction.line))
            read = min(read, -(-int(elements) * bits // 8))
        size += read
    return size + _written(module, computation, instruction)


def device_bytes(shape: str, line: str) -> int:
    """Bytes of the arrays of a shape that lie in the memory of the device.

    Raises:
        ValueError: an array in the memory of the host: no link to it is known.
    """
    return sum(array.bytes for array in _device_arrays(shape, line))


def called(module: Module, instruction: Instruction) -> Computation:
    """The computation that a fusion or a call runs.

    Raises:
        ValueError: it names none, or one that the text has not.
    """
    match = _CALLED.search(instruction.line)
    if match is None or match[1] not in module.computations:
        raise ValueError(
            f"timeline found no computation that {quote(instruction.line)} calls. It "
            "names one, which stands before it. Pass compiled.as_text() unchanged."
        )
    return module.computations[match[1]]


def _taken(module: Module, user: Instruction) -> list[float]:
    """How many elements an instruction reads of each operand, at most."""
    taken = [math.inf] * len(user.operands)
    if user.opcode in TAKES:
        taken[0] = arrays(user.shape, user.line)[0].elements
    elif in_place := len(updates(user)):
        taken[:in_place] = [0] * in_place
    elif user.opcode == "fusion":
        inner = called(module, user)
        needed = elements_needed(inner)
        for name, instruction in inner.items():
            if instruction.opcode == "parameter":
                place = int(instruction.line[instruction.start + 1 :].partition(")")[0])
                taken[place] = math.ceil(needed[name])
    return taken


def _written(module: Module, computation: Computation, one: Instruction) -> int:
    """What an instruction writes: an update in place alone, or its whole result."""
    if names := updates(one):
        scatter = one.opcode == "scatter"  # it adds to what is there, so it reads too
        size = 0
        for name, shape in zip(names, _ONE_ARRAY.findall(one.shape), strict=True):
            (update,) = arrays(_operand(computation, name, one).shape, one.line)
            there = _device_arrays(shape, one.line)
            size += sum(update.elements * array.bits // 8 for array in there)
        return (1 + scatter) * size
    if one.opcode == "fusion":
        inner = called(module, one)
        root = root_of(inner)
        return _written_by_root(module, inner, root, one.shape)
    results = _device_arrays(one.shape, one.line)
    if target_of(one).startswith("__cu") and len(results) > 1:
        results = tuple(a for a in results if a.dtype not in ("s8", "u8"))
    return sum(array.bytes for array in results)


def _written_by_root(
    module: Module, inner: Computation, root: Instruction, shape: str
) -> int:
    """What a fusion writes; its own shape says where the results lie."""
    shapes = _ONE_ARRAY.findall(shape)
    results = [root]
    if root.opcode == "tuple":
        results = [_operand(inner, name, root) for name in root.operands]
    if len(shapes) != len(results):  # a fusion or a scatter inside gives several
        shapes, results = [shape], [root]
    size = 0
    for each, result in zip(shapes, results, strict=True):
        made = _behind(inner, result)
        whole = device_bytes(each, root.line)
        if _is_in_place(inner, made):
            whole = min(whole, _written(module, inner, made))
        size += whole
    return size


def _is_in_place(inner: Computation, one: Instruction) -> bool:
    """Whether it is an update, and all that it updates comes from outside."""
    arrays_updated = one.operands[: len(updates(one))]
    made = [_behind(inner, _operand(inner, name, one)) for name in arrays_updated]
    return bool(made) and all(each.opcode == "parameter" for each in made)


def _behind(inner: Computation, instruction: Instruction) -> Instruction:
    """What has made a result, before it was cast or laid out anew."""
    while instruction.opcode in _PASSES:
        instruction = _operand(inner, instruction.operands[0], instruction)
    return instruction


def _operand(computation: Computation, name: str, user: Instruction) -> Instruction:
    if name not in computation:
        raise ValueError(
            f"timeline found no instruction named {name!r}, which is an operand of "
            f"{quote(user.line)}. What a kernel reads is the size of its operands. "
            "Pass the whole text, with every computation complete."
        )
    return computation[name]


def _device_arrays(shape: str, line: str) -> tuple[Array, ...]:
    """The arrays of a shape that lie in the memory of the device."""
    try:
        return _in_device(shape)
    except LookupError as error:
        raise ValueError(
            f"timeline cannot price {quote(line)}. It has an array in the memory of "
            "the host, S(5), and the link to the host is not part of a Hardware. "
            "Compile without offloading to the host."
        ) from error
    except ValueError:
        return arrays(shape, line)  # says what is wrong, and where


@functools.lru_cache(maxsize=4096)
def _in_device(shape: str) -> tuple[Array, ...]:
    spaces = [
        (match[1] if (match := _SPACE.search(each)) else _DEVICE, each)
        for each in _ONE_ARRAY.findall(shape)
    ]
    if any(space == _HOST for space, _ in spaces):
        raise LookupError(shape)
    return tuple(
        array
        for space, each in spaces
        if space == _DEVICE
        for array in arrays(each, each)
    )
