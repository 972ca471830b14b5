"""The operations of XLA's HLO, as the XLA of jax 0.10 to 0.12 knows them.

An operation that is not here may communicate, for all that can be told, so a program
with one is refused: a new kind of collective must not vanish from a report.
"""

import re

from jaxdp.program.hlo.module import Instruction
from jaxdp.program.hlo.shapes import quote

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# They name, lay out or order values, and run nothing.
FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
    *("partition-id", "replica-id", "after-all", "add-dependency", "opt-barrier"),
)
# In their brackets stand numbers, or nothing.
WITHOUT_OPERANDS = ("parameter", "constant", "iota", "partition-id", "replica-id")
SECOND_HALVES = ("-done", "-update")  # of an asynchronous form
_STAGES = ("-start", "-update", "-done")  # of an asynchronous form
_QUIET = frozenset(
    """
    abs acos acosh add add-dependency after-all and asin asinh async atan2 atanh
    batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert
    broadcast call cbrt ceil cholesky clamp compare complex concatenate conditional
    constant convert convolution copy cosh cosine count-leading-zeros custom-call divide
    domain dot dynamic-reshape dynamic-slice dynamic-update-slice erf exp2 exponential
    exponential-minus-one fft floor fusion gather get-dimension-size get-tuple-element
    imag infeed iota is-finite log log-plus-one log2 logistic map maximum minimum mulhi
    multiply negate not opt-barrier or outfeed pad parameter partition-id popcnt power
    ragged-dot real reduce reduce-precision reduce-window remainder replica-id reshape
    reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz
    round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter
    set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine
    sinh slice sort sqrt stochastic-convert subtract tan tanh topk transpose
    triangular-solve tuple while xor
    """.split()
)
# They communicate, and are refused where they are counted.
UNCOUNTABLE = {
    "ragged-all-to-all": "moves as much as offsets computed at run time say",
    "collective-reduce": "leaves the root, and with it the bytes, to attributes that "
    "are not documented",
    "send": "is one half of a transfer whose ends are not in the instruction",
    "recv": "is one half of a transfer whose ends are not in the instruction",
}
_KNOWN = _QUIET.union(KINDS, UNCOUNTABLE)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SYNCHRONOUS = re.compile(r'\\?"is_sync\\?":\s*true')


def target_of(instruction: Instruction) -> str:
    """What a custom call calls; "" for any other instruction."""
    if instruction.opcode != "custom-call":
        return ""
    match = _TARGET.search(instruction.line)
    return match[1] if match else ""


def is_marked_sync(instruction: Instruction) -> bool:
    """Whether XLA says of a start that nothing runs until its end, halves or not."""
    return _SYNCHRONOUS.search(instruction.line) is not None


def without_stage(opcode: str) -> str:
    """An opcode without the "-start", "-update" or "-done" of an asynchronous form."""
    for stage in _STAGES:
        if opcode.endswith(stage):
            return opcode.removesuffix(stage)
    return opcode


def check_known(instruction: Instruction) -> None:
    """Refuses an operation that XLA is not known to have.

    Raises:
        ValueError: Quotes its line.
    """
    if without_stage(instruction.opcode) not in _KNOWN:
        raise ValueError(
            f"analyze does not know the operation {instruction.opcode!r} in "
            f"{quote(instruction.line)}. It may communicate, and would be missing from "
            "every total. Report it with the jax version that printed it."
        )
