"""Which operations of a compiled program wait for which, whatever order they stand in.

The text of a program is one schedule of many: what may overlap is decided by what
depends on what. Two operations can run at the same time only if neither waits for the
other, and this tells, for the operations that take the time: matrix multiplications
(convolutions among them) and collectives.

The unit is what XLA starts as a whole. A fusion, a call, a conditional or a loop starts
when all its operands are there and gives its results when it is done, so everything in
it waits for all operands, and whoever uses one result waits for everything in it. Only
tuples are seen through. Operations of a loop body wait for each other, since the next
trip follows the last. A control dependency counts too. So a dependence that exists is
never missed: "does not wait for" is proven, "waits for" may be an upper bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdp.program.collective import CollectiveOp, kind_of, read
from jaxdp.program.hlo import Computation, Instruction, Module, parse
from jaxdp.program.hlo.opcodes import WITHOUT_OPERANDS
from jaxdp.program.products import is_matmul
from jaxdp.program.walk import computations_of

Names = frozenset[str]
_NOTHING: Names = frozenset()


@dataclass(frozen=True)
class Dependence:
    """What waits for what in one run of a program.

    Attributes:
        collectives: every collective, by the name of the instruction that starts it.
        matmuls: names of the matrix multiplications and convolutions.
        waits_for: for each of both, the names of those that it transitively depends on.
    """

    collectives: Mapping[str, CollectiveOp]
    matmuls: Names
    waits_for: Mapping[str, Names]

    def collectives_after_matmuls(self) -> dict[str, Names]:
        """Collectives that cannot start before a matrix multiplication is done."""
        return self._between(self.collectives, self.matmuls)

    def matmuls_after_collectives(self) -> dict[str, Names]:
        """Matrix multiplications that cannot start before a collective is done."""
        return self._between(self.matmuls, frozenset(self.collectives))

    def _between(self, names: Any, others: Names) -> dict[str, Names]:
        found = {name: self.waits_for[name] & others for name in names}
        return {name: waited for name, waited in found.items() if waited}


def dependence(compiled: Any) -> Dependence:
    """Reads what depends on what in a compiled program.

    Args:
        compiled: a `jax.stages.Compiled`, or the text of one.

    Returns:
        A `Dependence`. It knows instructions by name: XLA gives each name once.

    Raises:
        TypeError: neither of the two.
        ValueError: text that cannot be read, or an operand that is not in it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> program = jax.jit(lambda x, y: (x @ y) @ y)
        >>> x = jnp.ones((64, 64))
        >>> found = dependence(program.lower(x, x).compile())
        >>> sorted(len(found.waits_for[name]) for name in found.matmuls)
        [0, 1]
    """
    if not isinstance(compiled, str | jax.stages.Compiled):
        raise TypeError(
            f"dependence got a {type(compiled).__name__}. It reads a "
            "jax.stages.Compiled, or the text compiled.as_text() of one. Compile "
            "first: jax.jit(f).lower(*args).compile()."
        )
    module = parse(compiled if isinstance(compiled, str) else compiled.as_text() or "")
    reader = _Reader(module)
    reader.run(module.entry, _NOTHING)
    return Dependence(reader.collectives, frozenset(reader.matmuls), reader.waits_for)


@dataclass
class _Reader:
    """Follows a program from its parameters on."""

    module: Module
    collectives: dict[str, CollectiveOp] = field(default_factory=dict)
    matmuls: set[str] = field(default_factory=set)
    waits_for: dict[str, Names] = field(default_factory=dict)

    def run(self, computation: str, given: Names) -> Names:
        """Reads a computation whose parameters wait for `given`.

        Returns:
            The operations in it, inner computations included.
        """
        instructions = self.module.computations[computation]
        values: dict[str, Any] = {}
        inside: set[str] = set()
        for name, instruction in instructions.items():
            waited = given | self._operands(instruction, values)
            own = self._inside(instructions, instruction, waited)
            inside |= own
            values[name] = waited | own
            if instruction.opcode == "tuple":
                values[name] = [_flat(values[o]) for o in instruction.operands]
            elif instruction.opcode == "get-tuple-element":
                values[name] = self._element(instruction, values)
        return frozenset(inside)

    def _operands(self, instruction: Instruction, values: Mapping[str, Any]) -> Names:
        """What an instruction waits for before it starts."""
        known = instruction.opcode in WITHOUT_OPERANDS
        names = [] if known else [*instruction.operands]
        if "control-predecessors=" in instruction.line:
            before = instruction.attributes["control-predecessors"].strip("{}")
            names += [name.strip().lstrip("%") for name in before.split(",")]
        if missing := [name for name in names if name not in values]:
            raise ValueError(
                f"dependence found no {missing[0]!r} before {instruction.name!r}, that "
                "uses it. An instruction stands after everything it depends on, in the "
                "same computation. Pass compiled.as_text() unchanged."
            )
        return _NOTHING.union(*(_flat(values[name]) for name in names))

    def _inside(self, around: Computation, one: Instruction, waited: Names) -> Names:
        """The operations that an instruction is or runs; notes what they wait for."""
        if kind := kind_of(one):
            self.collectives[one.name] = read(self.module, around, one, kind)
        elif is_matmul(one):
            self.matmuls.add(one.name)
        else:
            return self._called(one, waited)
        self.waits_for[one.name] = self.waits_for.get(one.name, _NOTHING) | waited
        return frozenset([one.name])

    def _called(self, instruction: Instruction, waited: Names) -> Names:
        """The operations in what an instruction calls; in a loop, all wait for all."""
        called = computations_of(instruction)
        inside = _NOTHING.union(*(self.run(name, waited) for name in called))
        if instruction.opcode == "while":
            for name in inside:
                self.waits_for[name] |= inside
        return inside

    @staticmethod
    def _element(instruction: Instruction, values: Mapping[str, Any]) -> Names:
        """One element of a tuple, or all of what has only one value."""
        whole = values[instruction.operands[0]]
        if isinstance(whole, list):
            return whole[int(instruction.attributes["index"])]
        return whole


def _flat(value: Any) -> Names:
    """What a value waits for, all elements of a tuple together."""
    return _NOTHING.union(*value) if isinstance(value, list) else value
