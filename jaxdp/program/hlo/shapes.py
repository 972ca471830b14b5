"""The arrays in an HLO shape: `dtype[dims]{layout}`, or a tuple in parentheses.

Sizes are those of the elements. The padding of a tiled layout (TPU) is left out: it
is how an array lies in memory, and what travels is the runtime's business.
"""

import re
from dataclasses import dataclass
from math import prod

_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_QUOTE_CHARACTERS = 400


@dataclass(frozen=True)
class Array:
    """One array of a shape: element type in HLO's names, dimensions, bits an element.

    Example:
        >>> array = Array("f32", (1, 16), 32)
        >>> str(array), array.elements, array.bytes
        ('f32[1,16]', 16, 64)
    """

    dtype: str
    dims: tuple[int, ...]
    bits: int

    @property
    def elements(self) -> int:
        """How many elements the array has; 1 for a scalar."""
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size of the elements, without the padding of a tiled layout."""
        return -(-self.elements * self.bits // 8)

    def __str__(self) -> str:
        """As HLO writes it, without the layout."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def arrays(shape: str, line: str) -> tuple[Array, ...]:
    """All arrays of a shape, tuples flattened; `line` is quoted when it cannot.

    Elements narrower than a byte take a whole one unless the layout packs them: XLA
    marks that with `E(bits)`.

    Raises:
        ValueError: an element type or a dimension without a fixed size.
    """
    return tuple(
        _array(*match.groups(default=""), line=line)
        for match in _ARRAY.finditer(_COMMENT.sub("", shape))
        if match[1] not in ("token", "opaque")
    )


def quote(line: str) -> str:
    """A line for an error message: stripped, quoted, cut when it is very long."""
    line = line.strip()
    cut = line[:_QUOTE_CHARACTERS]
    return f"{cut!r}" + (" (cut)" if cut != line else "")


def _array(dtype: str, dims: str, layout: str, line: str) -> Array:
    packed = re.search(r"E\((\d+)\)", layout)
    width = "8" if dtype == "pred" else (re.findall(r"\d+", dtype) or [""])[0]
    sizes = dims.split(",") if dims else []
    if not width or not all(size.isdigit() for size in sizes):
        raise ValueError(
            f"analyze cannot size {dtype}[{dims}] in {quote(line)}. It needs an "
            "element type that names its bits, and dimensions of a fixed size. Compile "
            "with static shapes, or report the type this XLA prints."
        )
    bits = int(packed[1]) if packed else max(int(width), 8)
    return Array(dtype, tuple(map(int, sizes)), bits)
