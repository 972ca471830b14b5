"""One collective operation: what it moves, between which devices, and where from.

The same record describes a line of compiled HLO and an equation of a traced program,
so both are counted by the same formulas (`traffic`) and printed in the same table.

What a device puts in is read from the *operands*. The result is no safe source: an
asynchronous start has a tuple of operands, results and scratch, in a form that
differs by kind. Operand sizes are right for both forms, and for combined collectives,
which have several.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxdp.program.groups import Groups, Pairs, parse_groups, parse_pairs, to_devices
from jaxdp.program.hlo import Instruction, Module
from jaxdp.program.shapes import Array, arrays, quote

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_REFUSED = {
    "ragged-all-to-all": "moves as much as offsets computed at run time say",
    "send": "is one half of a transfer whose ends are not in the instruction",
    "recv": "is one half of a transfer whose ends are not in the instruction",
}


@dataclass(frozen=True)
class CollectiveOp:
    """One collective of a program and how often it runs.

    Attributes:
        kind: the name in HLO, such as "all-reduce", also for asynchronous forms.
        arrays: what each device puts in; several where XLA combined collectives.
        groups: logical devices that communicate with each other, or
        pairs: (source, target) of a collective-permute.
        count: how often one run of the program executes it: trip counts multiplied.
        name: the instruction, or the primitive in a traced program.
        op_name: the JAX operation it comes from.
        source: `file:line`, where XLA recorded it.
        branch: the branches it sits in, as (conditional, index of the branch); empty
            for an operation that always runs.
    """

    kind: str
    arrays: tuple[Array, ...]
    groups: Groups = ()
    pairs: Pairs = ()
    count: int = 1
    name: str = ""
    op_name: str = ""
    source: str = ""
    branch: tuple[tuple[str, int], ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types, each once."""
        return tuple(dict.fromkeys(array.dtype for array in self.arrays))

    @property
    def conditional(self) -> bool:
        """Whether it runs only if a branch is taken."""
        return bool(self.branch)

    @property
    def bytes(self) -> int:
        """Size of the *full* array, as nccl-tests counts it.

        The input of an all-reduce, reduce-scatter, all-to-all, broadcast or permute;
        the output of an all-gather, which is the input times the group size.
        """
        size = sum(array.bytes for array in self.arrays)
        return size * len(self.groups[0]) if self.kind == "all-gather" else size


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective an instruction starts, or None.

    Raises:
        ValueError: it communicates in a way whose bytes the text does not tell.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind in _REFUSED and instruction.attributes.get("is_host_transfer") != "true":
        raise ValueError(
            f"analyze cannot count {kind!r} in {quote(instruction.line)}. It counts "
            f"{', '.join(KINDS)}; a {kind} {_REFUSED[kind]}. Write the exchange with "
            "ppermute or all_to_all to have it counted."
        )
    return kind if kind in KINDS else None


def read(
    module: Module,
    computation: Mapping[str, Instruction],
    instruction: Instruction,
    kind: str,
) -> CollectiveOp:
    """Read one collective; it counts as run once, outside every branch.

    Raises:
        ValueError: operands, groups or pairs that the text does not settle.
    """
    attributes, line = dict(instruction.attributes), instruction.line
    for refused in ("slice_sizes", "has_dynamic_root"):
        if attributes.get(refused, "false") != "false":
            raise ValueError(
                f"analyze cannot count a {kind} with {refused}, in {quote(line)}. Part "
                "of what it moves is decided while the program runs. Report it with "
                "the function that was compiled."
            )
    permute = kind == "collective-permute"
    members = _members(module, attributes, kind, line)
    op_name, source = module.origin(instruction)
    return CollectiveOp(
        kind=kind,
        arrays=_operand_arrays(computation, instruction),
        groups=() if permute else members,
        pairs=tuple((pair[0], pair[1]) for pair in members) if permute else (),
        name=instruction.name,
        op_name=op_name,
        source=source,
    )


def _members(
    module: Module, attributes: Mapping[str, str], kind: str, line: str
) -> Groups:
    """The groups, or the pairs of a permute, in logical devices and checked."""
    if kind == "collective-permute":
        written = parse_pairs(attributes.get("source_target_pairs", ""), line)
        if not written:
            return ()
    else:
        written = parse_groups(attributes.get("replica_groups", "{}"), line)
    try:
        members = to_devices(
            written, kind, attributes, module.replicas, module.partitions
        )
    except IndexError as error:
        highest = max(number for group in written for number in group)
        raise ValueError(
            f"analyze found device {highest} in {quote(line)}. The module header says "
            f"replica_count={module.replicas} and num_partitions={module.partitions}, "
            f"so a {kind} can name fewer. Pass the text of the whole program, header "
            "included."
        ) from error
    # Each device is in one group; in a permute, it is one source and one target.
    lists = [sum(members, ())]
    if kind == "collective-permute":
        lists = list(zip(*members, strict=True))
    if any(len(set(devices)) != len(devices) for devices in lists):
        raise ValueError(
            f"analyze found a device twice in {quote(line)}. A {kind} has each device "
            "in one group, once; a permute, once as source and once as target. Pass "
            "compiled.as_text() unchanged."
        )
    return members


def _operand_arrays(
    computation: Mapping[str, Instruction], instruction: Instruction
) -> tuple[Array, ...]:
    shapes = []
    for operand in instruction.operands:
        if operand not in computation:
            raise ValueError(
                f"analyze found no instruction named {operand!r}, which is an operand "
                f"of {quote(instruction.line)}. What a collective moves is the size of "
                "its operands. Pass the whole text, with every computation complete."
            )
        shapes += arrays(computation[operand].shape, instruction.line)
    return tuple(shapes)
