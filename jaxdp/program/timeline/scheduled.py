"""The order in which a compiled program runs: what its streams are given, item by item.

XLA prints every computation in the order it has scheduled. Kept is what takes time:

    Kernel        work of the compute stream
    Start, Done   a collective goes to the communication stream; compute waits for it
    Copy          an array moves between memories of a TPU, beside both streams
    Loop          items that run so many times
    Branches      one of several lists of items

Calls and asynchronous wrappers are entered. A collective that XLA did not split into
start and done, or marked `is_sync`, blocks: compute waits for it where it starts.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from jaxdp.program.chains import ASYNC_DONE, ASYNC_START, chain_of
from jaxdp.program.collective import CollectiveOp, kind_of, read
from jaxdp.program.hlo import Computation, Instruction, Module
from jaxdp.program.hlo.brackets import split
from jaxdp.program.hlo.opcodes import (
    FREE,
    KINDS,
    SECOND_HALVES,
    is_marked_sync,
    target_of,
)
from jaxdp.program.hlo.shapes import arrays, quote
from jaxdp.program.products import FREE_CALLS
from jaxdp.program.timeline.moved import called, device_bytes
from jaxdp.program.timeline.work import Work, work
from jaxdp.program.trips import trip_count
from jaxdp.program.walk import computations_of

_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")


class Kernel(NamedTuple):
    """Work of the compute stream."""

    name: str
    work: Work


class Start(NamedTuple):
    """A collective goes to the communication stream."""

    name: str
    op: CollectiveOp
    blocks: bool  # the compute stream waits for it: XLA made it synchronous


class Copy(NamedTuple):
    """An array starts to move between memories; a `Done` waits for it."""

    name: str
    bytes: int


class Done(NamedTuple):
    """The compute stream waits for what was started."""

    name: str
    start: str


class Loop(NamedTuple):
    """Items that run `trips` times; the condition once more, before and between."""

    name: str
    condition: tuple["Item", ...]
    body: tuple["Item", ...]
    trips: int


class Branches(NamedTuple):
    """One of them runs; the text does not say which."""

    name: str
    branches: tuple[tuple["Item", ...], ...]


Item: TypeAlias = "Kernel | Start | Copy | Done | Loop | Branches"


def schedule(module: Module) -> tuple[Item, ...]:
    """What one run of a program gives to the streams of a device, in order.

    Raises:
        ValueError: a loop whose trip count the text does not say, a product whose FLOPs
            it does not say, or a collective that cannot be read; quotes the line.
    """
    return _Reader(module).items(module.entry)


def flat(items: tuple[Item, ...]) -> Iterator[Kernel | Start | Copy | Done]:
    """Items with those of loops and branches among them, each once."""
    for item in items:
        if isinstance(item, Loop):
            yield from flat(item.condition + item.body)
        elif isinstance(item, Branches):
            for branch in item.branches:
                yield from flat(branch)
        else:
            yield item


class _Reader:
    """Reads each computation once, however often it is called."""

    def __init__(self, module: Module):
        self.module = module
        self.known: dict[str, tuple[Item, ...]] = {}
        self.chains: dict[str, str] = {}  # chain_id: the fusion that has started it

    def items(self, computation: str) -> tuple[Item, ...]:
        if computation not in self.known:
            instructions = self.module.computations[computation]
            found: list[Item] = []
            for instruction in instructions.values():
                if instruction.opcode not in FREE:
                    found += self._read_or_refuse(instructions, instruction)
            self.known[computation] = tuple(found)
        return self.known[computation]

    def _read_or_refuse(self, around: Computation, one: Instruction) -> list[Item]:
        try:
            return [*self._read(around, one)]
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"timeline cannot read {quote(one.line)}: it found no {error}. An "
                "instruction needs its operands and attributes, and the computations "
                "that it calls. Pass compiled.as_text() unchanged."
            ) from error

    def _read(self, around: Computation, one: Instruction) -> Iterator[Item]:
        base = one.opcode.removesuffix("-start")
        if one.opcode.endswith(SECOND_HALVES):
            if one.opcode.endswith("-done"):
                yield Done(one.name, _start_of(around, one))
        elif kind := kind_of(one):
            op = read(self.module, around, one, kind)
            whole = not one.opcode.endswith("-start")
            yield Start(one.name, op, whole or is_marked_sync(one))
        elif base != one.opcode and base in _COPIES:
            yield Copy(one.name, _copied(one))
        elif base in ("call", "async"):
            yield from self._wrapped(one)
        elif one.opcode == "while":
            yield self._loop(around, one)
        elif one.opcode == "conditional":
            branches = (self.items(name) for name in computations_of(one))
            yield Branches(one.name, tuple(branches))
        elif one.opcode == "fusion":
            yield from self._fusion(around, one)
        elif target_of(one) not in FREE_CALLS:
            if base != one.opcode:  # beside other kernels: on the one stream there is
                shape = split(one.shape[1:-1])[1]
                one = dataclasses.replace(one, opcode=base, shape=shape)
            yield Kernel(one.name, work(self.module, around, one))

    def _wrapped(self, one: Instruction) -> Iterator[Item]:
        """What a call runs; collectives in an asynchronous one start under its name."""
        inside = [item for name in computations_of(one) for item in self.items(name)]
        starts = [item for item in inside if isinstance(item, Start)]
        if one.opcode.endswith("-start") and len(inside) == len(starts) == 1:
            inside = [starts[0]._replace(name=one.name, blocks=is_marked_sync(one))]
        yield from inside

    def _fusion(self, around: Computation, fusion: Instruction) -> Iterator[Item]:
        """A kernel; or what starts or ends a chain; it waits for other collectives."""
        inside = called(self.module, fusion)
        found = [one for one in inside.values() if one.opcode in KINDS]
        chains = [chain for one in found if (chain := chain_of(one))]
        targets = {target_of(one) for one in inside.values()} if chains else ()
        if ASYNC_START in targets:
            op = read(self.module, inside, found[0], found[0].opcode)
            self.chains[chains[0]] = fusion.name
            yield Start(fusion.name, op, blocks=False)
        elif ASYNC_DONE in targets:
            if chains[0] not in self.chains:
                raise _never_started(fusion)
            yield Done(fusion.name, self.chains[chains[0]])
        else:
            yield Kernel(fusion.name, work(self.module, around, fusion))
            for one in found:
                if kind := kind_of(one):  # none if it goes on with one of a chain
                    op = read(self.module, inside, one, kind)
                    yield Start(fusion.name, op, blocks=True)

    def _loop(self, around: Computation, one: Instruction) -> Loop:
        condition, body = (
            self.items(one.attributes[key].lstrip("%")) for key in ("condition", "body")
        )
        return Loop(one.name, condition, body, trip_count(self.module, around, one))


def _start_of(around: Computation, done: Instruction) -> str:
    """Which instruction has started what a -done waits for."""
    name = done.operands[0]
    while name in around and around[name].opcode.endswith("-update"):
        name = around[name].operands[0]
    if name not in around or not around[name].opcode.endswith("-start"):
        raise _never_started(done)
    return name


def _never_started(done: Instruction) -> ValueError:
    return ValueError(
        f"timeline found no start of what {quote(done.line)} waits for. It must stand "
        "before it in the same computation, so that it is of the same trip of a loop. "
        "Compile without pipelining collectives over the trips of a loop."
    )


def _copied(copy: Instruction) -> int:
    """Bytes that a copy moves in the memory of the device; the other end is on chip.

    Its shape holds what it is given, what it makes, and a context of on-chip memory.
    """
    if copy.opcode == "copy-start":
        return device_bytes(copy.shape, copy.line)
    return arrays(copy.shape, copy.line)[len(copy.operands)].bytes
