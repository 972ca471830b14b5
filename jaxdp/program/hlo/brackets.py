"""Brackets and commas of HLO text, outside of quotes and comments."""

import re
from collections.abc import Iterator

from jaxdp.program.hlo.shapes import quote

_BRACKET_OR_QUOTED = re.compile(
    r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|/\*.*?\*/|\{[\d,]+\}|[(){}\[\],]'
)
_NEXT = re.compile(r"\}, [\w\-]+=")  # an attribute behind another one


def _brackets(text: str, start: int) -> Iterator[tuple[int, str, int]]:
    """Brackets and commas outside quotes and comments, with the depth after each."""
    depth = 0
    for match in _BRACKET_OR_QUOTED.finditer(text, start):
        token = match[0]
        if len(token) == 1:
            depth += (token in "({[") - (token in ")}]")
            yield match.start(), token, depth


def closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    for position, _, depth in _brackets(text, start):
        if depth == 0:
            return position
    raise ValueError(
        f"analyze found no closing bracket in {quote(text)}. XLA prints an instruction "
        "on one line, with all its brackets. Pass compiled.as_text() unchanged."
    )


def split(text: str) -> list[str]:
    """Split at the commas outside brackets, quotes and comments."""
    cuts = [
        at for at, token, depth in _brackets(text, 0) if token == "," and depth == 0
    ]
    bounds = zip([-1, *cuts], [*cuts, len(text)], strict=True)
    items = (text[after + 1 : before].strip() for after, before in bounds)
    return [item for item in items if item]


def attribute_items(text: str) -> list[str]:
    """As `split`, faster: most of the text is a configuration that XLA prints last."""
    front, mark, back = text.partition(", backend_config={")
    if not mark or front.count('"') % 2 or _NEXT.search(back):
        return split(text)
    return [*split(front), f"backend_config={{{back.rstrip()}"]
