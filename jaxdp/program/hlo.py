"""Read the HLO text of a compiled program into computations and instructions.

`compiled.as_text()` is the only account of a program that every backend and every
way of compiling gives, so this reads text. It reads one instruction a line, as XLA
prints it, and takes a line apart only when somebody asks: a module has thousands of
instructions, and a handful move data between devices.

Legend: an instruction is `%name = shape opcode(operands), attribute=value, ...`; a
shape is text here (see `shapes`). Device numbers in
the text are *logical*: the position in the flattened mesh, not `jax.Device.id`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxdp.program.shapes import quote

# The first word of two letters or more right before "(" is the opcode: inside a
# shape only a layout has such words, and there none follows a blank. One letter is
# not enough, because XLA writes buffer shapes as `b(f32[8])`.
_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>[^\s=(){}]+) = (?P<shape>.*?) ?"
    r"(?<= )(?P<opcode>[a-z][\w\-]+)(?=\()"
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?\s*%?(?P<name>[^\s=(){}]+) (?:\(.*)?\{")
_BRACKET_OR_QUOTED = re.compile(
    r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|/\*.*?\*/|[(){}\[\],]'
)
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `start` is where its operand list opens."""

    name: str
    opcode: str
    shape: str
    line: str
    start: int

    @cached_property
    def _end(self) -> int:
        return _closing(self.line, self.start)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, without `%` and without the shapes some texts add."""
        inside = _COMMENT.sub("", self.line[self.start + 1 : self._end])
        return tuple(item.split()[-1].lstrip("%") for item in _split(inside))

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Everything after the operands, as written, by name."""
        found: dict[str, str] = {}
        for item in _split(self.line[self._end + 1 :]):
            key, _, value = item.partition("=")
            # mesh['a'=2,'b'=4], device_ids=(...) {'a'} is one value, comma or not.
            if key == "device_ids" and "replica_groups" in found:
                found["replica_groups"] += f", {item}"
            else:
                found[key] = value
        return found


@dataclass(frozen=True)
class Module:
    """A parsed program: computations by name, each a mapping of its instructions."""

    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str
    replicas: int
    partitions: int
    frames: Mapping[str, str]

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
        ValueError: a line inside a computation is no instruction, or the text does
            not hold exactly one module with one entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entries, headers, tables = [], [], []
    current: dict[str, Instruction] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if current is not None and line.lstrip().startswith("}"):
            current = None
        elif current is not None and line.strip():
            instruction = _instruction(line, number)
            current[instruction.name] = instruction
        elif match := _COMPUTATION.fullmatch(line.rstrip()):
            current = computations.setdefault(match["name"], {})
            entries += [match["name"]] if match["entry"] else []
        else:
            (headers if line.startswith("HloModule ") else tables).append(line)
    if len(headers) != 1 or len(entries) != 1:
        raise ValueError(
            f"analyze got a text with {len(headers)} 'HloModule' lines and "
            f"{len(entries)} ENTRY computations, and it reads exactly one of each. "
            "Pass compiled.as_text() of one compiled program, unchanged."
        )
    replicas, partitions = _device_counts(headers[0])
    return Module(computations, entries[0], replicas, partitions, _frames(tables))


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


def _frames(tables: list[str]) -> dict[str, str]:
    """`file:line` by stack frame, from the tables XLA prints before the code."""
    sections: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    for line in tables:
        number, _, value = line.partition(" ")
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = sections.setdefault(line, {})
        elif number.isdigit():
            section[number] = value
    files, frames = sections.get("FileNames", {}), {}
    for frame, value in sections.get("StackFrames", {}).items():
        location = dict(re.findall(r"(\w+)=(\d+)", value)).get("file_location_id", "")
        place = sections.get("FileLocations", {}).get(location, "")
        fields = dict(re.findall(r"(\w+)=(\d+)", place))
        if fields.get("file_name_id") in files:
            name = files[fields["file_name_id"]].strip('"')
            frames[frame] = f"{name}:{fields.get('line', '?')}"
    return frames


def _brackets(text: str, start: int) -> Iterator[tuple[int, str, int]]:
    """Brackets and commas outside quotes and comments, with the depth after each."""
    depth = 0
    for match in _BRACKET_OR_QUOTED.finditer(text, start):
        token = match[0]
        if len(token) == 1:
            depth += (token in "({[") - (token in ")}]")
            yield match.start(), token, depth


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    for position, _, depth in _brackets(text, start):
        if depth == 0:
            return position
    raise ValueError(
        f"analyze found no closing bracket in {quote(text)}. XLA prints an instruction "
        "on one line, with all its brackets. Pass compiled.as_text() unchanged."
    )


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets, quotes and comments."""
    cuts = [
        at for at, token, depth in _brackets(text, 0) if token == "," and depth == 0
    ]
    bounds = zip([-1, *cuts], [*cuts, len(text)], strict=True)
    items = (text[after + 1 : before].strip() for after, before in bounds)
    return [item for item in items if item]
