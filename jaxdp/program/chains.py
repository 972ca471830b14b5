"""Collectives that a TPU spreads over several fusions, to hide them behind others.

The first fusion ends in a custom call "AsyncCollectiveStart", the last one in an
"AsyncCollectiveDone", and all of them repeat the collective. It counts in the first.
"""

import re

from jaxdp.program.hlo import Instruction
from jaxdp.program.opcodes import KINDS

# The first one takes no flags from one before it.
_CHAIN = re.compile(r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"')


def starts_chain(instruction: Instruction) -> bool:
    """Whether a TPU starts a collective here that other fusions go on with."""
    return _flag(instruction) < 0


def continues(instruction: Instruction) -> bool:
    """Whether it repeats a collective that an earlier fusion of a TPU has started."""
    return _flag(instruction) > 0


def _flag(instruction: Instruction) -> int:
    """-1 where a chain of fusions starts, 1 where it goes on, 0 outside of one."""
    if instruction.opcode not in KINDS:
        return 0
    found = _CHAIN.search(instruction.line)
    return 0 if found is None else -1 if int(found[1]) < 0 else 1
