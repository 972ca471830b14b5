"""Collectives that a TPU spreads over several fusions, to hide them behind others.

The first fusion ends in a custom call "AsyncCollectiveStart", the last one in an
"AsyncCollectiveDone", and all of them repeat the collective, with one chain_id. It
counts in the first.
"""

import re

from jaxdp.program.hlo import Instruction
from jaxdp.program.hlo.opcodes import KINDS
from jaxdp.program.hlo.shapes import quote

ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_MENTIONED = re.compile(r'chain_id="|async_collective_fusion')
_CHAIN_ID = re.compile(r'\bchain_id="(\d+)"')
# The first one takes no flags from one before it.
_FLAG_START = re.compile(r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"')


def starts_chain(instruction: Instruction) -> bool:
    """Whether a TPU starts a collective here that other fusions go on with."""
    return _flag(instruction) < 0


def continues(instruction: Instruction) -> bool:
    """Whether it repeats a collective that an earlier fusion of a TPU has started."""
    return _flag(instruction) > 0


def chain_of(instruction: Instruction) -> str | None:
    """The chain that a collective belongs to, as its id; None outside of one."""
    match = _CHAIN_ID.search(instruction.line)
    return match[1] if match else None


def _flag(instruction: Instruction) -> int:
    """-1 where a chain of fusions starts, 1 where it goes on, 0 outside of one."""
    line = instruction.line
    if instruction.opcode not in KINDS or not _MENTIONED.search(line):
        return 0
    if (found := _FLAG_START.search(line)) is None:
        raise ValueError(
            f"analyze cannot tell whether {quote(line)} starts a collective or goes on "
            "with one. A TPU marks the fusions that share one by chain_id and "
            "async_collective_fusion_config, with flag_start. Report it with the "
            "libtpu version that printed it."
        )
    return -1 if int(found[1]) < 0 else 1
