"""Rounds of communication that a program cannot do at the same time.

Two collectives are in one round if neither waits for the other's result, however they
are scheduled: the permutes of a star are one round, those of a ring are N - 1 each way.
So this is the latency of a design, as bytes are its bandwidth.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxdp.program.collective import kind_of, read
from jaxdp.program.hlo import Computation, Instruction, Module
from jaxdp.program.hlo.opcodes import WITHOUT_OPERANDS
from jaxdp.program.trips import trip_count
from jaxdp.program.walk import computations_of

# Rounds before a value is there; of a tuple, those of each element.
Depth = int | tuple[int, ...]


def critical_rounds(module: Module) -> int:
    """Rounds on the longest chain of collectives that wait for each other's data.

    A permute that moves something is one round; a kind without pairs counts as the
    ring it is modelled by (`CollectiveOp.rounds`). What a fusion, call or conditional
    runs starts when all its operands are there; of branches the longest counts. Trips
    of a loop follow each other, so their rounds multiply by the trip count: an upper
    bound where the collectives of a trip do not wait for those of the trip before.

    Raises:
        ValueError: As `walk.collectives`.
    """
    return _Reader(module).longest(module.entry)


@dataclass
class _Reader:
    module: Module
    known: dict[str, int] = field(default_factory=dict)

    def longest(self, computation: str) -> int:
        """Rounds of the longest chain in a computation, inner ones included."""
        if computation not in self.known:
            instructions = self.module.computations[computation]
            depths: dict[str, Depth] = {}
            for name, one in instructions.items():
                depths[name] = self._depth(instructions, one, depths)
            self.known[computation] = max(map(_flat, depths.values()), default=0)
        return self.known[computation]

    def _depth(
        self,
        around: Computation,
        one: Instruction,
        depths: Mapping[str, Depth],
    ) -> Depth:
        """Rounds that are over when an instruction's value is there."""
        if one.opcode in WITHOUT_OPERANDS:
            return 0
        given = [depths[name] for name in one.operands]
        if one.opcode == "tuple":
            return tuple(map(_flat, given))
        if one.opcode == "get-tuple-element" and isinstance(given[0], tuple):
            return given[0][int(one.attributes["index"])]
        return max(map(_flat, given), default=0) + self._own(around, one)

    def _own(self, around: Computation, one: Instruction) -> int:
        """Rounds of one instruction itself."""
        if kind := kind_of(one):
            return read(self.module, around, one, kind).rounds
        inside = [self.longest(name) for name in computations_of(one)]
        if one.opcode == "while" and any(inside):
            trips = trip_count(self.module, around, one)
            body, condition = (
                self.longest(one.attributes[key].lstrip("%"))
                for key in ("body", "condition")
            )
            return trips * body + (trips + 1) * condition
        return max(inside, default=0)


def _flat(depth: Depth) -> int:
    """When all elements of a tuple are there."""
    return max(depth, default=0) if isinstance(depth, tuple) else depth
