"""Read the HLO text of a compiled program into computations and instructions.

`compiled.as_text()` is the only account of a program that every backend and every
way of compiling gives, so this reads text. It reads one instruction a line, as XLA
prints it, and takes a line apart only when somebody asks: a module has thousands of
instructions, and a handful move data between devices.

Legend: an instruction is `%name = shape opcode(operands), attribute=value, ...`; a
shape is text here (see `shapes`). Device numbers in the text are *logical*: the
position in the flattened mesh, not `jax.Device.id`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxdp.program.hlo.brackets import attribute_items, closing, split
from jaxdp.program.hlo.frames import SECTIONS, frames
from jaxdp.program.hlo.shapes import quote

# The first word of two letters or more right before "(" is the opcode: inside a
# shape only a layout has such words, and there none follows a blank. One letter is
# not enough, because XLA writes buffer shapes as `b(f32[8])`.
_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>[^\s=(){}]+) = (?P<shape>.*?) ?"
    r"(?<= )(?P<opcode>[a-z][\w\-]+)(?=\()"
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?\s*%?(?P<name>[^\s=(){}]+) (?:\(.*)?\{")
_ROOT = re.compile(r"\s*ROOT ")
_COMMENT = re.compile(r"/\*.*?\*/")
_BRACKET_OR_QUOTE = re.compile(r"""[(\[{"']""")
_HEADER = re.compile(r"^HloModule ", re.MULTILINE)
_ENTRY = re.compile(r"^ENTRY ", re.MULTILINE)
_TABLE_ROW = re.compile(r'\d+ (?:".*"|\{.*\})')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `start` is where its operand list opens."""

    name: str
    opcode: str
    shape: str
    line: str
    start: int

    @property
    def is_root(self) -> bool:
        """Whether it gives the result of its computation."""
        return _ROOT.match(self.line) is not None

    @cached_property
    def _end(self) -> int:
        end = self.line.find(")", self.start)
        if _BRACKET_OR_QUOTE.search(self.line, self.start + 1, end):
            return closing(self.line, self.start)
        return end if end > 0 else closing(self.line, self.start)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, without `%` and without the shapes some texts add."""
        inside = _COMMENT.sub("", self.line[self.start + 1 : self._end])
        return tuple(item.split()[-1].lstrip("%") for item in split(inside))

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Everything after the operands, as written, by name."""
        found: dict[str, str] = {}
        for item in attribute_items(self.line[self._end + 1 :]):
            key, _, value = item.partition("=")
            # mesh['a'=2,'b'=4], device_ids=(...) {'a'} is one value, comma or not.
            if key == "device_ids" and "replica_groups" in found:
                found["replica_groups"] += f", {item}"
            else:
                found[key] = value
        return found


Computation = Mapping[str, Instruction]  # by name, in the order of the text


def root_of(computation: Computation) -> Instruction:
    """The instruction whose result is that of its computation; not always the last.

    Raises:
        KeyError: none is marked so.
    """
    for instruction in computation.values():
        if instruction.is_root:
            return instruction
    raise KeyError("ROOT")


@dataclass(frozen=True)
class Module:
    """A parsed program: computations by name."""

    computations: Mapping[str, Computation]
    entry: str
    replicas: int
    partitions: int
    frames: Mapping[str, str]
    # What readers of a module have found, so that it is read once.
    found: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def devices(self) -> int:
        """How many devices run the program."""
        return self.replicas * self.partitions

    def origin(self, instruction: Instruction) -> tuple[str, str]:
        """The `op_name` and `file:line` an instruction comes from; "" if unknown."""
        metadata = instruction.attributes.get("metadata", "")
        fields = dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s}]+)', metadata))
        fields = {key: _unquoted(value) for key, value in fields.items()}
        source = self.frames.get(fields.get("stack_frame_id", ""), "")
        if "source_file" in fields:
            source = f"{fields['source_file']}:{fields.get('source_line', '?')}"
        return fields.get("op_name", ""), source


def parse(text: str) -> Module:
    """Read the text of one optimized module.

    Raises:
        ValueError: a line that is neither an instruction nor what stands around them, a
            name that is given twice, or a text that does not hold exactly one module
            with one entry computation, complete.
    """
    headers, entries = (len(found.findall(text)) for found in (_HEADER, _ENTRY))
    if (headers, entries) != (1, 1):
        raise ValueError(
            f"analyze got a text with {headers} 'HloModule' lines and {entries} ENTRY "
            "computations, and it reads exactly one of each. Pass compiled.as_text() "
            "of one compiled program, unchanged."
        )
    computations: dict[str, dict[str, Instruction]] = {}
    entry, header, line, tables = "", "", "", []
    current: dict[str, Instruction] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if current is not None and line.strip():
            if line.strip().split(",")[0] == "}":  # }, execution_thread="..."
                current = None
                continue
            instruction = _instruction(line, number)
            _check_new(instruction.name, current, line, number)
            current[instruction.name] = instruction
        elif match := _COMPUTATION.fullmatch(line.rstrip()):
            _check_new(match["name"], computations, line, number)
            current = computations[match["name"]] = {}
            entry = match["name"] if match["entry"] else entry
        elif _HEADER.match(line):
            header = line
        elif line.strip():
            _check_table(line, number)
            tables.append(line)
    if current is not None:
        raise ValueError(
            "analyze got a text that ends inside a computation: its last line is "
            f"{quote(line)}. Every computation ends with a brace. Pass "
            "compiled.as_text() of one compiled program, complete."
        )
    replicas, partitions = _device_counts(header)
    return Module(computations, entry, replicas, partitions, frames(tables))


def _check_new(name: str, known: Mapping[str, Any], line: str, number: int) -> None:
    if name in known:
        raise ValueError(
            f"analyze found a second {name!r} in line {number}: {quote(line)}. XLA "
            "gives each name once, and what uses it would be unclear. Pass "
            "compiled.as_text() unchanged."
        )


def _check_table(line: str, number: int) -> None:
    if line not in SECTIONS and _TABLE_ROW.fullmatch(line) is None:
        raise ValueError(
            f"analyze cannot read line {number} of the HLO text: {quote(line)}. It "
            "stands outside of every computation, and is no line of a table of "
            "files, functions or stack frames. Pass compiled.as_text() unchanged."
        )


def _unquoted(value: str) -> str:
    return value[1:-1].replace(r"\"", '"') if value.startswith('"') else value


def _instruction(line: str, number: int) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ValueError(
            f"analyze cannot read line {number} of the HLO text: {quote(line)}. Inside "
            "a computation every line must be '%name = shape opcode(operands), ...'. "
            "Pass compiled.as_text() unchanged: one instruction a line."
        )
    return Instruction(
        match["name"], match["opcode"], match["shape"], line, match.end()
    )


def _device_counts(header: str) -> tuple[int, int]:
    found = dict(re.findall(r"\b(replica_count|num_partitions)=(\d+)", header))
    return int(found.get("replica_count", 1)), int(found.get("num_partitions", 1))
