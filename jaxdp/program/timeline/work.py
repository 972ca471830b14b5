"""FLOPs and bytes of one kernel of a compiled program: the inputs of a roofline.

FLOPs are those of matrix products and convolutions, of all that a fusion contains; what
is done element by element, or in a reduction, is paid for by its bytes.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxdp.program.hlo import Computation, Instruction, Module
from jaxdp.program.hlo.opcodes import target_of
from jaxdp.program.products import FREE_CALLS, Product, product
from jaxdp.program.timeline.moved import called, moved_bytes

MATRIX_PRODUCT, CONVOLUTION, OTHER = "matrix product", "convolution", "other kernel"
_INSIDE = ("fusion", "call")


class Work(NamedTuple):
    """What one kernel does.

    Attributes:
        flops: Of its products, by element type of their operands.
        bytes: That it reads and writes in the memory of the device.
        kind: "matrix product", "convolution" or "other kernel".
        unknown_calls: Targets of custom calls whose FLOPs nobody knows; none counts.
    """

    flops: Mapping[str, int]
    bytes: int
    kind: str = OTHER
    unknown_calls: tuple[str, ...] = ()


def work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """The FLOPs and bytes of an instruction that is one kernel.

    Raises:
        ValueError: a product whose FLOPs the text does not say, an operand that is not
            in the computation, or an array in the memory of the host.
    """
    found = [*_products(module, computation, instruction)]
    flops: collections.Counter[str] = collections.Counter()
    by_kind: collections.Counter[str] = collections.Counter()
    for each in found:
        if isinstance(each, Product):
            flops[each.dtype] += each.flops
            kind = CONVOLUTION if each.is_convolution else MATRIX_PRODUCT
            by_kind[kind] += each.flops
    return Work(
        flops=dict(flops),
        bytes=moved_bytes(module, computation, instruction),
        kind=by_kind.most_common(1)[0][0] if by_kind else OTHER,
        unknown_calls=tuple(each for each in found if isinstance(each, str)),
    )


def _products(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[Product | str]:
    """Products in an instruction, and targets of custom calls that are unknown."""
    if found := product(computation, instruction):
        yield found
    elif instruction.opcode in _INSIDE:
        inner = called(module, instruction)
        for each in inner.values():
            yield from _products(module, inner, each)
    elif (target := target_of(instruction)) and target not in FREE_CALLS:
        yield target
