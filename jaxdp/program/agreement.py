"""Whether what a collective takes and what it gives agree with its kind.

Bytes are read from the operands. The result says the same once more, and a text in
which the two differ has been damaged, or means something else than is read here.
"""

from collections.abc import Sequence

from jaxdp.program.hlo.shapes import Array, quote

_Shape = tuple[str, tuple[int, ...]]


def check_shapes(
    kind: str,
    operands: Sequence[Array],
    results: Sequence[Array],
    group_size: int,
    dimensions: str,
    line: str,
) -> None:
    """Compares the result of a collective with what its operands become.

    Args:
        kind: The name in HLO, without "-start".
        operands: What each device puts in.
        results: All arrays of the result. That of an asynchronous start has the
            operands before, and scalars for the runtime behind.
        group_size: How many devices exchange.
        dimensions: The attribute, such as "{0}"; of kinds that cut or join.
        line: What an error quotes.

    Raises:
        ValueError: They disagree.
    """
    given = [(array.dtype, array.dims) for array in operands]
    made = [(array.dtype, array.dims) for array in results]
    wanted = given
    if kind in ("all-gather", "reduce-scatter"):
        axis = dimensions.strip("{}")
        if not axis.isdigit() or any(int(axis) >= len(dims) for _, dims in given):
            raise _disagreement(kind, operands, results, line, f"dimension {axis!r}")
        wanted = [_resized(kind, one, int(axis), group_size) for one in given]
    if made == wanted or _is_start(made, given, wanted):
        return
    raise _disagreement(kind, operands, results, line, f"groups of {group_size}")


def _resized(kind: str, shape: _Shape, axis: int, size: int) -> _Shape | None:
    """What becomes of one array; None if it does not divide."""
    dtype, dims = shape
    length, rest = dims[axis] * size, 0
    if kind == "reduce-scatter":
        length, rest = divmod(dims[axis], size)
    return None if rest else (dtype, (*dims[:axis], length, *dims[axis + 1 :]))


def _is_start(made: list, given: list, wanted: list) -> bool:
    behind = made[2 * len(given) :]
    return made[: 2 * len(given)] == [*given, *wanted] and all(
        shape in (("u32", ()), ("s32", ())) for shape in behind
    )


def _disagreement(
    kind: str, operands: Sequence[Array], results: Sequence[Array], line: str, why: str
) -> ValueError:
    given, made = (", ".join(map(str, arrays)) for arrays in (operands, results))
    return ValueError(
        f"analyze found an operand and a result that do not fit in {quote(line)}. A "
        f"{kind} of {given} with {why} does not give {made}. Pass compiled.as_text() "
        "unchanged."
    )
