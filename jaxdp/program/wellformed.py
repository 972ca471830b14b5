"""Whether the text of a program is whole: what it names is there, and in order.

XLA prints no other text. One that was cut, joined or edited on the way can still be
read line by line, and would give wrong totals without a word.
"""

import re
from collections import Counter
from collections.abc import Mapping

from jaxdp.program.chains import ASYNC_DONE, ASYNC_START, continues, starts_chain
from jaxdp.program.hlo.module import Computation, Instruction, Module
from jaxdp.program.hlo.opcodes import (
    KINDS,
    SECOND_HALVES,
    UNCOUNTABLE,
    WITHOUT_OPERANDS,
    check_known,
    target_of,
    without_stage,
)
from jaxdp.program.hlo.shapes import quote
from jaxdp.program.walk import computations_of

_NEEDS = {
    "fusion": ("calls",),
    "async": ("calls", "called_computations"),
    "call": ("to_apply", "calls"),
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "true_computation"),
}
_NEEDS_ALL = ("while",)
_OF_COLLECTIVES = re.compile(r"\b(?:replica_groups|source_target_pairs)=")
# Custom calls that communicate hide what they move.
_COMMUNICATING_TARGET = re.compile(
    r"all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective|nccl|nvshmem",
    re.IGNORECASE,
)


def check(module: Module) -> None:
    """Checks that a text is whole.

    Raises:
        ValueError: quotes the line with an operation that is not known, a name that is
            not there, attributes that do not belong to it, or half of an asynchronous
            operation; or names a computation without a result.
    """
    for name, computation in module.computations.items():
        _check_roots(name, computation)
        defined: dict[str, Instruction] = {}
        for instruction in computation.values():
            check_known(instruction)
            _check_operands(instruction, defined)
            _check_computations(instruction, module)
            _check_attributes(instruction)
            defined[instruction.name] = instruction
        _check_stages(computation)
        _check_chain(name, computation)


def _check_roots(name: str, computation: Computation) -> None:
    roots = [each.name for each in computation.values() if each.is_root]
    if len(roots) != 1:
        raise ValueError(
            f"analyze found {len(roots)} results in the computation {name!r}: {roots}. "
            "Exactly one instruction is marked ROOT. Pass compiled.as_text() unchanged."
        )


def _check_operands(one: Instruction, defined: Mapping[str, Instruction]) -> None:
    if one.opcode in WITHOUT_OPERANDS:
        return
    for operand in one.operands:
        if operand not in defined:
            raise _broken(
                one,
                f"no instruction named {operand!r}",
                "It is an operand, and stands before what uses it",
            )


def _check_computations(one: Instruction, module: Module) -> None:
    opcode = without_stage(one.opcode)
    first = not one.opcode.endswith(SECOND_HALVES)  # which need not repeat them
    if first and (needs := _NEEDS.get(opcode)):
        found = [key for key in needs if one.attributes.get(key)]
        if not found or (opcode in _NEEDS_ALL and len(found) != len(needs)):
            raise _broken(one, f"no {' or '.join(needs)}", f"A {opcode} has it")
    for name in computations_of(one):
        if name not in module.computations:
            raise _broken(one, f"no computation named {name!r}", "It is called there")


def _check_attributes(one: Instruction) -> None:
    opcode = without_stage(one.opcode)
    if opcode == "custom-call":
        target = target_of(one)
        ours = (ASYNC_START, ASYNC_DONE)
        if target not in ours and _COMMUNICATING_TARGET.search(target):
            raise _broken(
                one, f"the custom call {target!r}", "What it moves is not in the text"
            )
    second = one.opcode.endswith(SECOND_HALVES)
    if not second and (opcode in KINDS or opcode in UNCOUNTABLE):
        return
    if _OF_COLLECTIVES.search(one.line):
        for key in ("replica_groups", "source_target_pairs"):
            if key in one.attributes:
                raise _broken(one, f"{key} of a {one.opcode}", "It moves nothing")


def _check_stages(computation: Computation) -> None:
    """Checks that what starts is done, once, and what is done was started."""
    waiting: Counter[str] = Counter()
    used = set()
    for one in computation.values():
        if one.opcode in WITHOUT_OPERANDS:
            continue
        used.update(one.operands)
        if not one.opcode.endswith(SECOND_HALVES):
            continue
        stage = without_stage(one.opcode)
        if stage in UNCOUNTABLE:
            continue
        before = computation[one.operands[0]] if one.operands else one
        waiting[before.name] += 1
        halves = (f"{stage}-start", f"{stage}-update")
        # A start that a loop carries along comes as a tuple.
        carried = before.opcode in ("get-tuple-element", "parameter")
        if before.opcode not in halves and not (carried and before.shape[:1] == "("):
            raise _broken(one, f"no {halves[0]}", "What is done must have been started")
        if waiting[before.name] > 1:
            raise _broken(one, f"a second {one.opcode}", "It is done once")
    for one in computation.values():
        if one.opcode.endswith("-start") and not one.is_root and one.name not in used:
            raise _broken(one, "nothing that waits for it", "What starts must be done")


def _check_chain(name: str, computation: Computation) -> None:
    """Checks the marks by which a TPU says that fusions go on with a collective."""
    calls = [target_of(one) for one in computation.values()]
    started = [one for one in computation.values() if starts_chain(one)]
    if len(started) != calls.count(ASYNC_START):
        raise ValueError(
            f"analyze found {calls.count(ASYNC_START)} {ASYNC_START} "
            f"in the computation {name!r}, and {len(started)} collectives to start. "
            "Each starts one. Pass compiled.as_text() unchanged."
        )
    continued = any(continues(one) for one in computation.values())
    if ASYNC_DONE in calls and not continued:
        raise ValueError(
            f"analyze found an {ASYNC_DONE} in the computation {name!r} without "
            "the collective that is done. Pass compiled.as_text() unchanged."
        )


def _broken(one: Instruction, found: str, rule: str) -> ValueError:
    return ValueError(
        f"analyze found {found} in {quote(one.line)}. {rule}. Pass compiled.as_text() "
        "of one compiled program, unchanged."
    )
