"""The order in which a compiled program runs, read from its text.

XLA prints a computation in the order it has scheduled. What takes time is kept: kernels
with the FLOPs of their matrix multiplications and the bytes they read and write;
collective-permutes with their bytes and pairs, split into start and done where XLA made
them asynchronous.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxdp.program.collective import kind_of, read
from jaxdp.program.dependence import is_matmul
from jaxdp.program.hlo import Instruction, Module, parse
from jaxdp.program.shapes import arrays, quote
from jaxdp.program.walk import computations_of

FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "partition-id",
    "replica-id",
    "after-all",
)
CONTRACTED = re.compile(
    r'lhs_contracting_(?:dims=\{|dimensions"?:\s*\[)(?P<axes>[\d",\s]*)[\]}]'
)


class Kernel(NamedTuple):
    """Work of the compute stream."""

    name: str
    flops: int
    bytes: int


class Start(NamedTuple):
    """A collective-permute goes to the communication stream."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    bytes: int
    blocks: bool  # the compute stream waits for it: XLA made it synchronous


class Done(NamedTuple):
    """The compute stream waits for a collective-permute."""

    name: str
    start: str


Item = Kernel | Start | Done


def schedule(text: str) -> tuple[Item, ...]:
    """Reads what the entry computation runs, in order.

    Raises:
        ValueError: a collective that is no permute, or sits in a loop or a branch; a
            matrix multiplication whose FLOPs the text does not tell.
    """
    module = parse(text)
    entry = module.computations[module.entry]
    items = []
    for instruction in entry.values():
        if instruction.opcode in FREE:
            continue
        if instruction.opcode == "collective-permute-done":
            items.append(Done(instruction.name, instruction.operands[0]))
        elif kind := kind_of(instruction):
            op = read(module, entry, instruction, kind)
            if kind != "collective-permute":
                raise _unplaced(instruction)
            blocks = not instruction.opcode.endswith("-start")
            blocks = blocks or '"is_sync":true' in instruction.line
            items.append(Start(instruction.name, op.pairs, op.bytes, blocks))
        else:
            moved = [entry[o].shape for o in instruction.operands] + [instruction.shape]
            size = sum(a.bytes for shape in moved for a in arrays(shape, ""))
            items.append(
                Kernel(instruction.name, _flops(module, entry, instruction), size)
            )
    return tuple(items)


def hidden_by(items: tuple[Item, ...]) -> dict[str, tuple[str, ...]]:
    """For each collective the matrix multiplications between its start and its done."""
    done_at = {i.start: at for at, i in enumerate(items) if isinstance(i, Done)}
    found = {}
    for at, item in enumerate(items):
        if isinstance(item, Start):
            until = at if item.blocks else done_at[item.name]
            between = [i for i in items[at:until] if isinstance(i, Kernel) and i.flops]
            found[item.name] = tuple(kernel.name for kernel in between)
    return found


def _flops(
    module: Module, computation: Mapping[str, Instruction], one: Instruction
) -> int:
    """FLOPs of the matrix multiplications in an instruction, of all its branches."""
    if is_matmul(one):
        return _matmul_flops(computation, one)
    total = 0
    for name in computations_of(one):
        inside = module.computations[name]
        for inner in inside.values():
            if kind_of(inner):
                raise _unplaced(inner)
            total += _flops(module, inside, inner)
    return total


def _matmul_flops(computation: Mapping[str, Instruction], one: Instruction) -> int:
    """2 x the elements of the result x those of the contracted axes."""
    match = CONTRACTED.search(one.line.replace('\\"', '"'))
    if match is None:
        raise ValueError(
            f"schedule cannot tell the FLOPs of {quote(one.line)}. They are 2 x the "
            "elements of the result x those of the contracted axes, which it does not "
            "name. Estimate a program without convolutions."
        )
    (left, *_) = arrays(computation[one.operands[0]].shape, one.line)
    (result, *_) = arrays(one.shape, one.line)  # a library gives its workspace too
    contracted = re.findall(r"\d+", match["axes"])
    return 2 * result.elements * math.prod(left.dims[int(axis)] for axis in contracted)


def _unplaced(instruction: Instruction) -> ValueError:
    return ValueError(
        f"schedule found {quote(instruction.line)}. It places collective-permutes of "
        "the entry computation on a stream, and neither other collectives nor those "
        "in a loop or branch. Estimate a program of permutes that always run."
    )
