"""Which values of a scheduled module are alive when it needs the most memory.

In the text of a scheduled module order is the schedule, so a value lives from the
instruction that makes it to the last one that reads it. The rules by which XLA shares
buffers are followed where they matter:

    another name for a value   bitcast, tuple, get-tuple-element, opt-barrier, -done
    written in place           dynamic-update-slice, scatter, loop state
    elementwise                a fusion takes over an operand of its size that dies here
    held by somebody else      arguments, constants, results

What remains unknown is how XLA packs buffers that live at different times, scratch of
libraries, and in-place operations it decides on case by case. So the sum is close to
the size of the temporaries that XLA reports, and not equal to it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdp.program.hlo import Instruction, Module, root_of
from jaxdp.program.hlo.opcodes import SECOND_HALVES, WITHOUT_OPERANDS
from jaxdp.program.hlo.shapes import arrays
from jaxdp.program.walk import computations_of

_SAME = ("bitcast", "get-tuple-element", "tuple", "opt-barrier", "add-dependency")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_NOT_SHARED = (
    *("dot", "convolution", "custom-call", "copy", "transpose", "reduce"),
    *("all-reduce", "reduce-scatter", "all-gather", "collective-permute"),
)
_OUTSIDE = (*WITHOUT_OPERANDS, "after-all")
# Computations of these are inside a kernel: nothing in them takes memory.
_RUNS = ("while", "conditional", "call")


@dataclass
class Value:
    """One array in memory.

    Attributes:
        nbytes: Its size; 0 if somebody else holds it.
        name: The instruction that makes it.
        op_name: The JAX operation it comes from, "" if unknown.
        shape: As HLO writes it.
        users: `op_name`s of the operations that read it.
        first: Position of the instruction that makes it.
        last: Position of the last that reads it.
    """

    nbytes: int
    name: str
    op_name: str
    shape: str
    first: int
    last: int
    users: set[str] = field(default_factory=set)


def live_at_peak(module: Module) -> tuple[Value, ...]:
    """The values alive at the moment when all temporaries together are largest.

    Arguments and results of the program are not among them.
    """
    return tuple(_Reader(module).peak(module.entry))


class _Reader:
    """Follows the values of a module."""

    def __init__(self, module: Module):
        self.module = module
        self.known: dict[str, list[Value]] = {}

    def peak(self, computation: str) -> list[Value]:
        """Values that are alive at the peak of one run of a computation."""
        if computation not in self.known:
            self.known[computation] = _Computation(self, computation).peak()
        return self.known[computation]

    def origin(self, instruction: Instruction) -> str:
        """The `op_name` of an instruction, or of what a fusion does last."""
        op_name, _ = self.module.origin(instruction)
        if op_name.count("/") > 1 or instruction.opcode != "fusion":
            return op_name
        for called in computations_of(instruction):
            inner = [*self.module.computations[called].values()]
            names = (self.module.origin(one)[0] for one in reversed(inner))
            op_name = next((name for name in names if name.count("/") > 1), op_name)
        return op_name

    def parts(self, instruction: Instruction) -> list[str]:
        """The `op_name` of each array that an instruction makes."""
        made = arrays(instruction.shape, instruction.line)
        called = computations_of(instruction)
        if instruction.opcode == "fusion" and len(made) > 1 and called:
            inner = self.module.computations[called[0]]
            root = root_of(inner)
            if root.opcode == "tuple" and len(root.operands) == len(made):
                whole = self.origin(instruction)
                each = (self.origin(inner[name]) for name in root.operands)
                return [name or whole for name in each]
        return [self.origin(instruction)] * len(made)


class _Computation:
    """The values of one computation, and how long each lives."""

    def __init__(self, reader: _Reader, name: str):
        self.reader = reader
        self.instructions = [*reader.module.computations[name].values()]
        self.root = root_of(reader.module.computations[name])
        self.values: dict[str, Any] = {}  # a Value, or a list of them
        self.all: list[Value] = []
        self.inside: dict[int, list[Value]] = {}
        self.reads = Counter(name for one in self.instructions for name in one.operands)
        self.made_by_done = {
            one.operands[0]: one
            for one in self.instructions
            if one.opcode.endswith("-done")
        }

    def peak(self) -> list[Value]:
        for position, one in enumerate(self.instructions):
            self._read(position, one)
            self.values[one.name] = self._made(position, one)
        for value in _flat(self.values[self.root.name]):
            value.nbytes = 0  # whoever asked for it has it
        self._share()
        return self._largest()

    def _read(self, position: int, one: Instruction) -> None:
        """Notes that an instruction reads its operands."""
        if one.opcode in WITHOUT_OPERANDS:
            return
        user = self.reader.origin(one)
        for name in one.operands:
            for value in _flat(self.values.get(name, [])):
                value.last = position
                if one.opcode not in _SAME:
                    value.users.add(user)

    def _made(self, position: int, one: Instruction) -> Any:
        """What an instruction makes: new values, or names for old ones."""
        operands = [self.values.get(name) for name in one.operands]
        if one.opcode == "tuple":
            return operands
        if one.opcode == "get-tuple-element":
            whole = operands[0]
            index = int(one.attributes["index"])
            return whole[index] if isinstance(whole, list) else whole
        if one.opcode in _SAME or one.opcode.endswith(SECOND_HALVES):
            return operands[0]
        if one.opcode == "copy" and self._stays(one):
            return operands[0]
        if one.opcode in _RUNS:
            self._run(position, one)
        if one.opcode == "while" or one.opcode in _IN_PLACE or self._updates(one):
            return operands[0] if one.opcode != "fusion" else self._updated(one)
        return self._new(position, self.made_by_done.get(one.name, one), one)

    def _stays(self, one: Instruction) -> bool:
        """Whether a copy of an argument is where the argument was, and its result is.

        XLA copies a donated argument that a later result replaces. If nobody else reads
        the argument, and a fusion makes that result of the copy, all three are one.
        """
        name = one.operands[0]
        source = next(other for other in self.instructions if other.name == name)
        alike = source.shape == one.shape and source.opcode == "parameter"
        return (
            alike
            and self.reads[name] == 1
            and any(
                other.opcode == "fusion" and one.name in other.operands
                for other in self.instructions
                if other.name in self.root.operands
            )
        )

    def _run(self, position: int, one: Instruction) -> None:
        """Adds what lives inside a loop, a branch or a call while it runs."""
        peaks = [self.reader.peak(name) for name in computations_of(one)]
        self.inside[position] = max(peaks, key=_total, default=[])

    def _updates(self, one: Instruction) -> bool:
        """Whether a fusion writes a slice into one of its operands."""
        return one.opcode == "fusion" and self._updated(one) is not None

    def _updated(self, one: Instruction) -> Any:
        """The operand that a fusion updates in place; None if it does not."""
        inner = self.reader.module.computations[computations_of(one)[0]]
        root = root_of(inner)
        while root.opcode in ("bitcast", "convert", "copy") and root.operands:
            root = inner[root.operands[0]]
        if root.opcode not in _IN_PLACE:
            return None
        target = inner[root.operands[0]]
        while target.opcode == "bitcast":
            target = inner[target.operands[0]]
        if target.opcode != "parameter":
            return None
        number = int(target.line[target.start + 1 :].split(")")[0])
        return self.values.get(one.operands[number])

    def _new(self, position: int, shaped: Instruction, one: Instruction) -> Any:
        """New values, one per array."""
        outside = one.opcode in _OUTSIDE
        names = self.reader.parts(shaped)
        sources = [v for name in one.operands for v in _flat(self.values.get(name))]
        made = []
        for array, op_name in zip(
            arrays(shaped.shape, shaped.line), names, strict=True
        ):
            nbytes = 0 if outside else array.bytes
            if not op_name and sources:  # XLA's own copy, in another layout
                op_name = max(sources, key=lambda value: value.nbytes).op_name
            made.append(
                Value(nbytes, one.name, op_name, str(array), position, position)
            )
        self.all += made
        return made if shaped.shape.startswith("(") else made[0] if made else []

    def _share(self) -> None:
        """Lets elementwise operations take over an operand that dies in them."""
        born: dict[int, list[Value]] = defaultdict(list)
        for value in self.all:
            born[value.first].append(value)
        for value in self.all:
            one = self.instructions[value.last]
            if value.last > value.first and one.opcode not in (*_NOT_SHARED, *_RUNS):
                for other in born[value.last]:
                    if other.nbytes == value.nbytes:
                        born[value.last].remove(other)
                        value.last -= 1
                        break

    def _largest(self) -> list[Value]:
        """What is alive where the sum is largest."""
        change = [0] * (len(self.instructions) + 1)
        for value in self.all:
            change[value.first] += value.nbytes
            change[value.last + 1] -= value.nbytes
        best, peak, alive = 0, -1, 0
        for position in range(len(self.instructions)):
            alive += change[position]
            total = alive + _total(self.inside.get(position, ()))
            if total > peak:
                best, peak = position, total
        here = [v for v in self.all if v.first <= best <= v.last and v.nbytes]
        return here + self.inside.get(best, [])


def _flat(value: Any) -> list[Value]:
    if isinstance(value, list):
        return [one for item in value for one in _flat(item)]
    return [] if value is None else [value]


def _total(values: Sequence[Value]) -> int:
    return sum(value.nbytes for value in values)
