"""A traced program cut into segments, each of which makes some of its results.

A segment holds what its results need and no earlier segment has made, in the order of
the program; what nobody needs for now moves to a later segment, and what nobody needs
at all is dropped. Nothing is computed twice: values that later segments read are passed
on.

Inner calls are opened first, since XLA inlines them too. Loops and rematerialized
blocks stay whole: their results come all at once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Literal

from jaxdp import jaxprs


class Operation(NamedTuple):
    """One operation of a flat program; values are numbered.

    Attributes:
        eqn: The equation of the traced program.
        inputs: Values it reads.
        outputs: Values it makes.
    """

    eqn: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass
class Flat:
    """A program without inner calls.

    Attributes:
        operations: In order.
        constants: Values that are known before it runs.
        given: Its arguments.
        results: What it returns.
    """

    operations: list[Operation]
    constants: dict[int, Any]
    given: tuple[int, ...]
    results: tuple[int, ...]
    values: int = 0

    @classmethod
    def of(
        cls, jaxpr: Jaxpr, known: Sequence[Any], consts: Sequence[Any] = ()
    ) -> "Flat":
        """Flattens a traced program.

        Args:
            jaxpr: The program.
            known: For each argument its value if that is a constant, or None.
            consts: Its own constants.
        """
        flat = cls([], {}, (), ())
        numbers = [flat.constant(k) if k is not None else flat.new() for k in known]
        flat.given = tuple(numbers)
        flat.results = flat.read(jaxpr, consts, numbers)
        return flat

    def new(self) -> int:
        """The number of another value."""
        self.values += 1
        return self.values - 1

    def constant(self, value: Any) -> int:
        """The number of a constant."""
        number = self.new()
        self.constants[number] = value
        return number

    def read(
        self, jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[int]
    ) -> tuple[int, ...]:
        """Appends the operations of a program; returns the numbers of its results."""
        numbers = dict(zip(jaxpr.invars, given, strict=True))
        numbers.update(
            (variable, self.constant(value))
            for variable, value in zip(jaxpr.constvars, consts, strict=True)
        )

        def number(atom):
            return (
                self.constant(atom.val) if isinstance(atom, Literal) else numbers[atom]
            )

        for eqn in jaxpr.eqns:
            inputs = tuple(number(atom) for atom in eqn.invars)
            if (called := jaxprs.plain_call(eqn)) is not None:
                outputs = self.read(called.jaxpr, called.consts, inputs)
            else:
                outputs = tuple(self.new() for _ in eqn.outvars)
                self.operations.append(Operation(eqn, inputs, outputs))
            numbers.update(zip(eqn.outvars, outputs, strict=True))
        return tuple(number(atom) for atom in jaxpr.outvars)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a program that makes some of its results.

    Attributes:
        operations: In order.
        constants: Those of the program.
        reads: Values that it is given: arguments of the program, or made before.
        writes: Values that it makes and later segments read.
        results: Values that it is there for, made by itself or before.
        spent: Values that it reads and no later segment does.
    """

    operations: tuple[Operation, ...]
    constants: dict[int, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[int, ...]
    spent: tuple[int, ...]

    def __call__(self, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs it.

        Args:
            given: The values that it reads.

        Returns:
            Its results, and the values that it writes.
        """
        values = self.constants | dict(zip(self.reads, given, strict=True))
        for eqn, inputs, outputs in self.operations:
            made = jaxprs.evaluate(eqn, [values[i] for i in inputs])
            values.update(zip(outputs, made, strict=True))
        return [values[i] for i in self.results], [values[i] for i in self.writes]


def cut(flat: Flat, groups: Sequence[Sequence[int]]) -> list[Segment]:
    """Cuts a program into one segment per group of results.

    Args:
        flat: The program.
        groups: Which of its results each segment is there for, by position.

    Returns:
        The segments, in the order of the groups. An operation with a side effect (a
        debug print) is in the last segment, unless an earlier one needs it.
    """
    wanted = [tuple(flat.results[i] for i in group) for group in groups]
    made, parts = set(flat.constants) | set(flat.given), []
    for position, results in enumerate(wanted):
        last = position == len(wanted) - 1
        operations = _needed(flat.operations, results, made, last)
        made |= {v for operation in operations for v in operation.outputs}
        parts.append(operations)
    reads = [
        _read(operations, results) - set(flat.constants)
        for operations, results in zip(parts, wanted, strict=True)
    ]
    segments = []
    for position, operations in enumerate(parts):
        later = set().union(*reads[position + 1 :])
        own = {v for operation in operations for v in operation.outputs}
        segments.append(
            Segment(
                tuple(operations),
                flat.constants,
                tuple(sorted(reads[position])),
                tuple(sorted(own & later)),
                wanted[position],
                tuple(sorted(reads[position] - later)),
            )
        )
    return segments


def _needed(
    operations: Sequence[Operation], results: Sequence[int], made: set, effects: bool
) -> list[Operation]:
    """The operations that results need beyond what is made, in order."""
    needed, found = set(results) - made, []
    for operation in reversed(operations):
        done = operation.outputs and made.issuperset(operation.outputs)
        acts = effects and operation.eqn.effects and not done
        if acts or not needed.isdisjoint(operation.outputs):
            needed |= set(operation.inputs) - made
            found.append(operation)
    return found[::-1]


def _read(operations: Sequence[Operation], results: Sequence[int]) -> set[int]:
    """The values that operations and results need from elsewhere."""
    own = {v for operation in operations for v in operation.outputs}
    return {v for operation in operations for v in operation.inputs}.union(
        results
    ) - own
