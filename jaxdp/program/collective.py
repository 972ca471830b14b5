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
from typing import cast

from jaxdp.program.agreement import check_shapes
from jaxdp.program.chains import continues
from jaxdp.program.hlo import Instruction, Module
from jaxdp.program.hlo.groups import Groups, Pairs
from jaxdp.program.hlo.opcodes import KINDS, UNCOUNTABLE
from jaxdp.program.hlo.shapes import Array, arrays, quote
from jaxdp.program.members import EVERYBODY, members

_ATTRIBUTES = frozenset(
    """
    backend_config channel_id constrain_layout control-predecessors dimensions
    execution_thread frontend_attributes has_dynamic_root metadata origin
    output_to_operand_aliasing replica_groups sharding slice_sizes source_target_pairs
    statistics to_apply use_global_device_ids
    """.split()
)


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

    @property
    def group_size(self) -> int:
        """Devices of the largest group; of a permute 2, or 1 if nothing moves."""
        if self.kind == "collective-permute":
            return 1 + any(source != target for source, target in self.pairs)
        return max(map(len, self.groups), default=1)

    @property
    def ring_passes(self) -> int:
        """How often a ring brings every chunk around: for an all-reduce, twice."""
        return 2 if self.kind == "all-reduce" else 1

    @property
    def rounds(self) -> int:
        """Messages that wait for each other; of kinds without pairs, as in a ring."""
        return self.ring_passes * (self.group_size - 1)

    @property
    def bus_factor(self) -> float:
        """What makes an algorithm bandwidth a bus bandwidth, as in nccl-tests.

        With `n` devices in a group, 2 (n - 1) / n for an all-reduce, (n - 1) / n for
        a reduce-scatter, all-gather and all-to-all, and 1 for the others. Then
        `busbw = bytes / seconds * bus_factor` compares with the speed of a link.

        References:
            https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        if self.kind not in EVERYBODY:
            return 1.0
        return self.rounds / self.group_size


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective an instruction starts, or None.

    Raises:
        ValueError: it communicates in a way whose bytes the text does not tell.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        return None if continues(instruction) else kind
    if kind in UNCOUNTABLE and instruction.attributes.get("is_host_transfer") != "true":
        raise ValueError(
            f"analyze cannot count {kind!r} in {quote(instruction.line)}. It counts "
            f"{', '.join(KINDS)}; a {kind} {UNCOUNTABLE[kind]}. Write the exchange "
            "with ppermute or all_to_all to have it counted."
        )
    return None


def read(
    module: Module,
    computation: Mapping[str, Instruction],
    instruction: Instruction,
    kind: str,
) -> CollectiveOp:
    """Read one collective; it counts as run once, outside every branch.

    Raises:
        ValueError: operands, groups or pairs that the text does not settle, an unknown
            attribute, or a result that does not fit.
    """
    if id(instruction) not in module.found:
        op = _read(module, computation, instruction, kind)
        module.found[id(instruction)] = op
    return module.found[id(instruction)]


def _read(
    module: Module,
    computation: Mapping[str, Instruction],
    instruction: Instruction,
    kind: str,
) -> CollectiveOp:
    attributes, line = dict(instruction.attributes), instruction.line
    _check_attributes(attributes, kind, line)
    permute = kind == "collective-permute"
    taking_part = members(module, attributes, kind, line)
    operands = _operand_arrays(computation, instruction)
    sizes = {len(group) for group in taking_part}
    if kind in ("all-gather", "reduce-scatter", "all-to-all") and len(sizes) > 1:
        raise ValueError(
            f"analyze found groups of {sorted(sizes)} devices in {quote(line)}. The "
            f"groups of a {kind} are equally large. Pass compiled.as_text() unchanged."
        )
    dimensions = attributes.get("dimensions", "")
    results = arrays(instruction.shape, line)
    check_shapes(kind, operands, results, max(sizes, default=1), dimensions, line)
    op_name, source = module.origin(instruction)
    return CollectiveOp(
        kind=kind,
        arrays=operands,
        groups=() if permute else taking_part,
        pairs=cast(Pairs, taking_part) if permute else (),
        name=instruction.name,
        op_name=op_name,
        source=source,
    )


def _check_attributes(attributes: Mapping[str, str], kind: str, line: str) -> None:
    for refused in ("slice_sizes", "has_dynamic_root"):
        if attributes.get(refused, "false") != "false":
            raise ValueError(
                f"analyze cannot count a {kind} with {refused}, in {quote(line)}. Part "
                "of what it moves is decided while the program runs. Report it with "
                "the function that was compiled."
            )
    strange = [key for key in attributes if key not in _ATTRIBUTES]
    permute = kind == "collective-permute"
    needed = "source_target_pairs" if permute else "replica_groups"
    if strange or needed not in attributes:
        found = f"the attribute {strange[0]!r}" if strange else f"no {needed}"
        raise ValueError(
            f"analyze found {found} in {quote(line)}. A {kind} says with {needed} who "
            "takes part, and an attribute that is not known may change that. Report it "
            "with the jax version that printed it."
        )


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
