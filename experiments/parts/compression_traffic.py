"""How many bytes gradients need, by formula: nothing here reads a program."""

import math
from collections.abc import Sequence

from jaxdp.compression import Compression, Int8, PowerSGD, Quantized, TopK

Shape = tuple[int, ...]
FLOAT_BYTES, SCALE_BYTES, INDEX_BYTES = 4, 2, 4


def formula_bytes(
    compression: Compression | None, shapes: Sequence[Shape], devices: int
) -> float:
    """What a device sends of its gradients in a step.

    Args:
        compression: How they travel.
        shapes: Of the parameters, in float32.
        devices: N.
    """
    if isinstance(compression, TopK):
        numbers = sum(math.ceil(compression.ratio * math.prod(s)) for s in shapes)
        return (devices - 1) * numbers * (FLOAT_BYTES + INDEX_BYTES)
    # Everything else goes there and back, a part by way of each device.
    return 2 * (devices - 1) / devices * _encoded_bytes(compression, shapes)


def _encoded_bytes(compression: Compression | None, shapes: Sequence[Shape]) -> float:
    """Of all gradients, encoded, without padding."""
    if isinstance(compression, PowerSGD):
        travelling = [_thin(compression, shape) for shape in shapes]
        return sum(travelling) * _number_bytes(compression.inner)
    return sum(map(math.prod, shapes)) * _number_bytes(compression)


def _number_bytes(compression: Compression | None) -> float:
    """Of one number."""
    if isinstance(compression, Int8):
        return 1 + SCALE_BYTES / compression.block
    return FLOAT_BYTES / 2 if isinstance(compression, Quantized) else FLOAT_BYTES


def _thin(compression: PowerSGD, shape: Shape) -> int:
    """Numbers of both factors, or of a leaf that travels whole."""
    cuts = [sum(_sides(shape, axis)) for axis in range(1, len(shape))]
    factors = [compression.rank * cut for cut in cuts]
    return min([math.prod(shape), *factors])


def _sides(shape: Shape, axis: int) -> tuple[int, int]:
    """Rows and columns."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])
