"""FLOPs of the matrix products and convolutions in a compiled program.

Two FLOPs for each pair of elements that is multiplied and added. A product has as many
as its result has elements, times those of the contracted axes. A convolution multiplies
only where the window lies on an element: padding and the holes of a dilated input do
not count. That matters on TPUs, where XLA writes products of batches as convolutions
with dilation.

The element type is that of the operands, which decides how fast a product is.
"""

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from jaxdp.program.hlo import Computation, Instruction
from jaxdp.program.hlo.opcodes import target_of
from jaxdp.program.hlo.shapes import Array, arrays, quote

MATMULS = ("dot", "scaled-dot", "ragged-dot", "convolution")
# Libraries that XLA calls instead: cuBLAS, cuDNN, oneDNN.
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|conv)', re.IGNORECASE)
# They mark something for XLA's compiler for TPUs, and run nothing.
FREE_CALLS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast")
_CONTRACTED = re.compile(
    r'lhs_contracting_(?:dims=\{|dimensions"?:\s*\[)(?P<axes>[\d",\s]*)[\]}]'
)
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_GROUPS = re.compile(r"\b(feature|batch)_group_count=(\d+)")
_EXACT = re.compile(r"operand_precision=\{[^}]*highest")


class Product(NamedTuple):
    """FLOPs of one product.

    Attributes:
        flops: Two for each multiplication.
        dtype: Element type of the operands, in HLO's names; "f32 highest" where the
            program asks for float32 without rounding to a narrower type.
        is_convolution: Whether it slides a window.
    """

    flops: int
    dtype: str
    is_convolution: bool


def is_matmul(instruction: Instruction) -> bool:
    """Whether an instruction multiplies matrices itself, or has a library do it."""
    if instruction.opcode == "custom-call":
        return _LIBRARY.search(instruction.line) is not None
    return instruction.opcode in MATMULS


def product(computation: Computation, instruction: Instruction) -> Product | None:
    """The FLOPs of an instruction, or None if it is no product that is understood.

    Raises:
        ValueError: a product of HLO, cuBLAS or cuDNN whose FLOPs the text does not say.
    """
    if not is_matmul(instruction):
        return None
    line, target = instruction.line.replace('\\"', '"'), target_of(instruction)
    left, right = _operands(computation, instruction)
    result = arrays(instruction.shape, line)[0]  # a library gives its workspace too
    if labels := _LABELS.search(line):
        sizes = _roles(target, left, right, result)
        try:
            flops, slides = _convolution_flops(line, labels.groups(), *sizes)
        except (IndexError, ValueError) as error:
            raise _unpriced(instruction) from error
    elif match := _CONTRACTED.search(line):
        axes = map(int, re.findall(r"\d+", match["axes"]))
        flops, slides = 2 * result.elements * math.prod(left.dims[a] for a in axes), 0
    elif target.startswith("__onednn$matmul"):
        axis = -2 if '"transpose_a":true' in line else -1
        flops, slides = 2 * result.elements * left.dims[axis], 0
    elif instruction.opcode == "custom-call" and not target.startswith("__cu"):
        return None
    else:
        raise _unpriced(instruction)
    wide = max(left, right, key=lambda array: array.bits).dtype
    exact = wide == "f32" and _EXACT.search(line)
    return Product(flops, "f32 highest" if exact else wide, bool(slides))


def _operands(
    computation: Computation, instruction: Instruction
) -> tuple[Array, Array]:
    """The two that are multiplied."""
    try:
        left, right = (computation[name] for name in instruction.operands[:2])
        (left,) = arrays(left.shape, instruction.line)
        (right,) = arrays(right.shape, instruction.line)
    except (KeyError, ValueError) as error:
        raise _unpriced(instruction) from error
    return left, right


def _roles(target: str, left: Array, right: Array, result: Array) -> tuple[Array, ...]:
    """Input, kernel and output of the convolution that window and labels describe.

    cuDNN's two for the backward pass are described by the one of the forward pass.
    """
    if target == "__cudnn$convBackwardInput":
        return result, right, left
    if target == "__cudnn$convBackwardFilter":
        return left, result, right
    return left, right, result


def _convolution_flops(
    line: str, labels: tuple[str, ...], image: Array, kernel: Array, output: Array
) -> tuple[int, int]:
    """FLOPs of a convolution, and how many axes its window slides along."""
    given, weights, made = labels
    groups = {kind: int(count) for kind, count in _GROUPS.findall(line)}
    count = image.dims[given.index("f")] // groups.get("feature", 1)
    count *= image.dims[given.index("b")] // groups.get("batch", 1)
    count *= kernel.dims[weights.index("o")]
    window = _window(line)
    axes = sorted(label for label in made if label.isdigit())
    for axis in axes:
        shape = image.dims[given.index(axis)], output.dims[made.index(axis)]
        count *= _pairs(*shape, *(part[int(axis)] for part in window))
    # XLA writes products as convolutions on TPUs.
    return 2 * count, 0 if "dot_general" in line else len(axes)


def _window(line: str) -> tuple[list[int], ...]:
    """Size, stride, low padding and the dilations of input and kernel, by axis."""
    match = _WINDOW.search(line)
    fields = dict(part.split("=") for part in match[1].split()) if match else {}
    sizes = [int(size) for size in fields.get("size", "").split("x") if size]

    def field(name: str, default: str) -> list[int]:
        parts = fields[name].split("x") if name in fields else [default] * len(sizes)
        return [int(part.split("_")[0]) for part in parts]

    others = ("stride", "1"), ("pad", "0"), ("lhs_dilate", "1"), ("rhs_dilate", "1")
    return sizes, *(field(*each) for each in others)


@functools.lru_cache(maxsize=4096)
def _pairs(
    given: int, made: int, size: int, stride: int, pad: int, hole: int, step: int
) -> int:
    """Places x weights of a window, along one axis, that lie on an element.

    Input of `given` elements, `hole` apart; output of `made`; a window of `size`
    weights, `step` apart, that moves by `stride`.
    """
    at = np.arange(made)[:, None] * stride + np.arange(size) * step - pad
    real = (at >= 0) & (at < (given - 1) * hole + 1) & (at % hole == 0)
    return int(real.sum())


def _unpriced(instruction: Instruction) -> ValueError:
    return ValueError(
        f"timeline cannot tell the FLOPs of {quote(instruction.line)}. It reads the "
        "contracted axes of a product (lhs_contracting_dims, or dot_dimension_numbers "
        "of a library), the window and dim_labels of a convolution, and the shapes of "
        "both operands. Pass compiled.as_text() unchanged, or report what XLA printed."
    )
